"""Messages between hook and coordinator: declared once in `messages.py`, for Python and C.

In: bytes of a ZeroMQ connection.  Out: messages, or `RemoteProtocolError` for a peer's error.
Non-goals: sockets; the effect of a message.  This folder imports no other folder of the package.
"""
