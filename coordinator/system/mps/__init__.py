"""NVIDIA's MPS for one user: the control daemon, and the programs that join it at their start.

In: connections of launchers on `mps.sock`, the control daemon's process.  Out: the pipe directory that a program joins
by, or a refusal with its reason and remedy.
Non-goals: the scheduling of MPS clients (engine); programs that no launcher starts.
"""
