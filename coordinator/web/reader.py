"""The page's way to the coordinator: requests on control.sock, trace events on events.sock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import ControlCaller, EventReader
from nvshare.coordinator.system.runtime_dir import RuntimeDir

RECONNECT_S: Final = 1.0


class Reader(Protocol):
    """The page's access to a coordinator.  Both methods may block for seconds."""

    def call(self, request: api.Request) -> Any:
        """The result of a request.  Raises ControlError and NoCoordinatorError."""

    def follow(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Gives each trace event to `take`, for ever."""


class SocketReader:
    """A reader of the sockets in a runtime directory."""

    def __init__(self, directory: RuntimeDir) -> None:
        self._directory = directory
        self._caller = ControlCaller(directory.control_socket)

    def call(self, request: api.Request) -> Any:
        return api.decode_reply(self._caller.call(api.encode_request(request)))

    def follow(self, take: Callable[[dict[str, Any]], None]) -> None:
        pause = threading.Event()
        while True:
            reader = EventReader(self._directory.events_socket)
            try:
                for frame in reader.frames():
                    take(api.decode_event(frame))
            finally:
                reader.close()
            pause.wait(RECONNECT_S)
