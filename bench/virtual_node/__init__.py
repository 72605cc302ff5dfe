"""The virtual node: programs, links, cards and time that follow rules, around the real engine.

In: jobs, or a seed.  Out: what the engine makes of them, with every invariant checked after each event, or the event
that broke one.  Used by bench.simulate, bench.scale, bench.soak and the tests.
Non-goals: speed of real hardware.
"""
