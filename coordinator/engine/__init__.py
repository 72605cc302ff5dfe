"""The deterministic core: `Scheduler.handle(event, now_ns) -> commands`.

In: events and the time.  Out: commands for the daemon.  A policy is asked through `policy_guard.py`.
Non-goals: clocks, sockets, files, randomness, the names of policies.
"""
