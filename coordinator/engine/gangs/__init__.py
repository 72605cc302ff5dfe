"""Gangs: programs on several GPUs that have their turns at the same time.

In: the model.  Out: which gang has a turn, until when, and what it owes the others.
Non-goals: leases of one GPU (engine).
"""
