"""The kubelet's side: the device plugin, its slots' owners, and the hook library on the node.

In: gRPC calls of the kubelet, NVML, the coordinator's socket.  Out: device lists, allocations, `slot.json` files.
Non-goals: what the coordinator does with a slot; scheduling.
"""
