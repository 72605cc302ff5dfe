"""gRPC over the Unix sockets by which the kubelet and its plugins call each other.

Non-goals: messages, and when to serve or to call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

CHANNEL_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),  # servers reject the default, a Unix socket's path
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 << 20),
)


def serve(path: Path, services: Mapping[str, Mapping[str, Any]], threads: int) -> Any:
    """A server with these services, of handlers by method, that has started.  Raises OSError."""
    path.unlink(missing_ok=True)
    server = grpc.server(ThreadPoolExecutor(threads), options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
    handlers = [grpc.method_handlers_generic_handler(name, calls) for name, calls in services.items()]
    server.add_generic_rpc_handlers(handlers)
    try:
        bound = server.add_insecure_port(f"unix://{path}")
    except RuntimeError:
        bound = 0
    if not bound:
        raise OSError(0, "cannot be served on", str(path))
    server.start()
    return server


def unary(behaviour: Callable[[Any, Any], Any], request: Any) -> Any:
    """The handler of a method: (request, context) -> response."""
    return grpc.unary_unary_rpc_method_handler(
        behaviour, request_deserializer=request.FromString, response_serializer=serialize
    )


def call(path: Path, method: str, request: Any, response: Any, timeout_s: float) -> Any:
    """One call of a method, `/SERVICE/NAME`.  Raises grpc.RpcError."""
    with grpc.insecure_channel(f"unix://{path}", options=CHANNEL_OPTIONS) as channel:
        made: Any = channel.unary_unary(method, request_serializer=serialize, response_deserializer=response.FromString)
        return made(request, timeout=timeout_s)


def serialize(message: Any) -> bytes:
    """A message's bytes."""
    data: bytes = message.SerializeToString()
    return data


def sentence(error: Exception) -> str:
    """An error of a call."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)
