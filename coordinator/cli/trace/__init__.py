"""`nvshare-ctl trace`: records what happens for some seconds, and writes it for Perfetto or as a picture.

In: trace events, one reply of `status`.  Out: Chrome's trace event format, a PNG.  `recording.py` turns events into
spans; `perfetto.py` and `plot.py` write them; only `command.py` knows sockets.
Non-goals: work on the GPU itself (`nvshare.bench.timeline` draws it beside the leases).
"""
