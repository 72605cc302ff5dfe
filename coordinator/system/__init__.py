"""The machine under a coordinator: GPUs, runtime directory, journal, GPU locks, process limits and host memory.

In: paths, device handles, `/proc`.  Out: small records and files.
Non-goals: scheduling; sockets of hooks and tools (daemon).
"""
