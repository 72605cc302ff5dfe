"""`nvshare-ctl trace`: records what happens for some seconds, and writes it for Perfetto.

In: trace events, one reply of `status`.  Out: Chrome's trace event format.  `spans.py` turns events into spans,
also for the web page and the demo; `recording.py` adds names and plans; only `command.py` knows sockets.
Non-goals: work on the GPU itself.
"""
