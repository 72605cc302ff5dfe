"""Kubernetes support beside the coordinator: device plugin, slots, pod annotations, admission.

In: the kubelet's calls, the API server's pods and reviews.  Out: slot directories, container environments, patches.
Folders: `slots` is what the coordinator reads, `cluster` talks to the API server, `node` talks to the kubelet.
Invariant: the coordinator and the hook work without this package and without a cluster.
Non-goals: scheduling.
"""
