"""The routes of the page: its three files, the live picture, and changes with a token.

Invariants: a request with a foreign Host header is refused, so no other site's name can lead to the page (DNS
rebinding).  A change needs the token in a header and, from a browser, the page's own origin; no URL has the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgpack
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.web.live import Live
from nvshare.coordinator.web.reader import Reader

STATIC: Final = Path(__file__).parent / "static"
HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
TOKEN_HEADER: Final = "X-NVShare-Token"
CHANGES: Final = (api.Ping, api.Pause, api.Resume, api.EndClient, api.Set)
SETTINGS: Final = ("class", "quantum")
"""Requests and settings that the page may use with a token.  Ping checks the token."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Guard:
    """Refuses foreign hosts and adds the headers of `HEADERS`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app if _host_name(Headers(scope=scope)) in HOSTS else _WRONG_HOST
        await app(scope, receive, send_with_headers)


_WRONG_HOST: Final = PlainTextResponse("open this page as http://127.0.0.1:PORT/ or http://localhost:PORT/\n", 421)


def _host_name(headers: Headers) -> str:
    """The Host header without its port; "" unless there is exactly one."""
    hosts = headers.getlist("host")
    name, colon, port = hosts[0].rpartition(":") if len(hosts) == 1 else ("", "", "")
    return name if colon and port.isdecimal() else hosts[0] if len(hosts) == 1 else ""


def make_app(reader: Reader, token: str | None) -> Guard:
    """The page.  `token` None: it only shows."""
    shown = Live(reader)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        shown.follow_events()
        running = asyncio.create_task(shown.run())
        yield
        running.cancel()

    async def pictures(request: Request) -> Response:
        if not _is_own(request.headers):
            return PlainTextResponse("another page asks\n", 403)
        found = shown.join()
        first = json.dumps({"may_change": token is not None})

        async def stream() -> AsyncIterator[str]:
            yield f"data: {first}\n\n"
            async for text in found:
                yield f"data: {text}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def change(request: Request) -> Response:
        return await _change(reader, token, request)

    routes = [
        Route("/live", pictures),
        Route("/change", change, methods=["POST"]),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan))


def _is_own(headers: Headers) -> bool:
    """Whether the page itself asks, as far as a browser tells; a tool tells nothing."""
    own = f"http://{headers['host']}"
    return headers.get("origin", own) == own and headers.get("sec-fetch-site", "none") in ("same-origin", "none")


async def _change(reader: Reader, token: str | None, request: Request) -> Response:
    headers = request.headers
    if token is None:
        return _refused(403, "read_only", "this page only shows: start the coordinator with --web-token-file")
    if not _is_own(headers):
        return _refused(403, "origin", "a change comes from this page alone")
    if not hmac.compare_digest(headers.get(TOKEN_HEADER, "").encode(), token.encode()):
        return _refused(401, "token", "the token is not that of the coordinator's --web-token-file")
    try:
        result: Any = await asyncio.to_thread(reader.call, _allowed(await _body(request)))
    except api.ControlError as error:
        return _refused(400, error.code, error.text)
    except NoCoordinatorError as error:
        return _refused(503, "no_coordinator", str(error))
    return JSONResponse({"result": result})


def _allowed(frame: bytes) -> api.Request:
    asked = api.decode_request(frame)
    if not isinstance(asked, CHANGES) or (isinstance(asked, api.Set) and asked.setting not in SETTINGS):
        raise api.ControlError("request", f"the page does not ask for this {asked.ask}")
    return asked


async def _body(request: Request) -> bytes:
    """A JSON object as a frame of the control protocol.  Raises ControlError."""
    if request.headers.get("content-type") != "application/json":
        raise api.ControlError("malformed", "not JSON")
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > api.MAX_REQUEST_BYTES:
            raise api.ControlError("malformed", "too long")
    try:
        packed: bytes = msgpack.packb({**json.loads(content), "version": api.CONTROL_VERSION})
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise api.ControlError("malformed", "not a JSON object") from None
    return packed


def _refused(status: int, code: str, text: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "text": text}}, status)
