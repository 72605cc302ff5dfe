"""`nvshare-ctl top`: the GPUs and their programs, live.

In: replies of `status`, keys.  Out: frames of text, requests.  `frame.py` is a pure function of two replies and the
user's choice; `choice.py` turns keys into choices and requests; only `command.py` and `keyboard.py` touch terminal
and sockets.
"""
