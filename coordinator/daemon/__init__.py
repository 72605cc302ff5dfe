"""The coordinator's process: sockets, clock and files around the engine.

In: frames of hooks, requests of `nvshare-ctl`, slots, signals, settings.  Out: the engine's commands carried out as
messages, journal records, timers and metrics.
Non-goals: scheduling (engine), memory plans (memory).
"""
