"""Commands for people: `nvshare-run`, `nvshare-ctl`, `nvshare-demo`.

In: command lines, answers of a coordinator's control socket.  Out: launched programs, requests, tables, JSON.
Non-goals: decisions about GPUs; the engine (only the control protocol is known here).
"""
