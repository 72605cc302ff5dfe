"""The machine below a coordinator: GPUs, runtime directory, journal, locks of cards, limits and memory of the host.

In: paths, device handles, `/proc`.  Out: small records and files.
Non-goals: scheduling; sockets of hooks and tools (daemon).
"""
