"""The control protocol of `nvshare-ctl`: requests, their server, its sockets, and the settings that operators make.

In: request frames.  Out: reply frames, admin events for the engine, the file of live settings.
Non-goals: printing (cli); the effect of an admin event (engine).
"""
