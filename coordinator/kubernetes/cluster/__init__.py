"""The API server's side: what annotations mean, the watch of this node's pods.

In: pods as parsed JSON.  Out: container settings, findings.
Non-goals: gRPC and the kubelet, slot files, scheduling.
"""
