"""The tables and lines of `nvshare-ctl`, made from one reply.

In: a reply of `status`, a width.  Out: lines of text; JSON of the whole reply.  Each view is a pure function of
the reply and shows nothing that `-o json` lacks; only `output.py` knows terminal and sockets.
"""
