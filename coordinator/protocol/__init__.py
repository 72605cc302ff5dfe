"""Messages between hook and coordinator: declared once in `messages.py`, for Python and for C.

In: bytes of a ZeroMQ connection.  Out: messages, or `RemoteProtocolError` for whatever a peer must not send.
Non-goals: what a message means; sockets.  This folder imports nothing of ours.
"""
