"""Models of the processes in a world: hooked programs with their memory, and hostile clients.

In: decoded messages of the coordinator.  Out: frames for the coordinator.
Non-goals: checks; the coordinator's side.
"""
