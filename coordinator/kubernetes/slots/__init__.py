"""Slots on one node: their files, and what the coordinator makes of them.

In: slot directories that the device plugin writes.  Out: client identities, limits, events for the scheduler, metrics.
Non-goals: gRPC, the kubelet, the API server.  The coordinator imports this folder only.
"""
