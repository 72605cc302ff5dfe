"""The coordinator's web page: a process beside the coordinator that reads its sockets and serves browsers on loopback.

Non-goals: the coordinator's loop, and anything that `nvshare-ctl` cannot know or do.
"""
