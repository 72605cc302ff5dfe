"""The coordinator's process: sockets, clock and files around the engine.

In: frames of hooks, requests of `nvshare-ctl`, slots, signals, settings.  Out: events for the engine, and its commands
carried out: messages, journal records, timers, metrics.
Non-goals: who runs and what memory moves (engine, memory).
"""
