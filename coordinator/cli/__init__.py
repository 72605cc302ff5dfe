"""The commands `nvshare-run`, `nvshare-ctl` and `nvshare-demo`.

In: command lines, replies of a coordinator's control socket.  Out: launched programs, requests, tables, JSON.
Non-goals: scheduling; the engine (the commands know the control protocol only).
"""
