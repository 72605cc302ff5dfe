"""Seeded worlds: the engine, the decoder and the dispatcher with simulated programs, time, sockets and journal.

In: a seed.  Out: a run in which every invariant was checked after each event, or the event that broke one.
Non-goals: speed of real hardware; nothing here runs in a coordinator.
"""
