"""The API server's side: what annotations mean, the watch of this node's pods, the admission webhook.

In: pods and AdmissionReviews as parsed JSON.  Out: container settings, findings, JSON patches.
Non-goals: gRPC and the kubelet, slot files, scheduling.
"""
