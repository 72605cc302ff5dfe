"""Seeded worlds: engine, decoder and dispatcher with simulated programs, time and sockets.

In: a seed.  Out: a run with every invariant checked after each event, or the event that broke one.
Non-goals: speed of real hardware.  Nothing here runs in a coordinator.
"""
