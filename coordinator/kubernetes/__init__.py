"""What Kubernetes needs beside the coordinator: device plugin, slots, annotations of pods, admission.

Invariants: the coordinator and the hook work without this package and without a cluster.

May not go here: scheduling.
"""
