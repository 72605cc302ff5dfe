"""Kubernetes support beside the coordinator: device plugin, slots, pod annotations.

In: the kubelet's calls, the API server's pods.  Out: slot directories, container environments and mounts.
Folders: `slots` is what the coordinator reads, `cluster` talks to the API server, `node` talks to the kubelet.
Invariant: the coordinator and the hook work without this package and without a cluster.
Non-goals: scheduling.
"""
