"""As made_up_gpus.py, with a mistake of our own: a client named `crash` makes the coordinator raise."""

from typing import Any

from nvshare.coordinator.daemon.dispatch import Dispatcher

_hello = Dispatcher._hello


def _crash(self: Dispatcher, connection: int, hello: Any, now_ns: int) -> None:
    if hello.name == "crash":
        raise RuntimeError("made-up mistake")
    _hello(self, connection, hello, now_ns)


if __name__ == "__main__":
    import sys

    import made_up_gpus  # type: ignore[import-not-found]  # beside this program

    Dispatcher._hello = _crash  # type: ignore[method-assign]
    count = int(sys.argv[1])
    devices = [
        made_up_gpus.Device(index, made_up_gpus.uuid_of(index), "made-up GPU", 8 << 30) for index in range(count)
    ]
    made_up_gpus.serve_devices(sys.argv[2:], devices)
