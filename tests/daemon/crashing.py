"""As made_up_gpus.py, with mistakes of our own: a client named `crash` makes the core raise.

One named `hang` makes `$HANG_UNTIL.began` and blocks the loop until the file `$HANG_UNTIL` exists.
"""

import os
import threading
from pathlib import Path
from typing import Any

from nvshare.coordinator.engine.scheduler import Scheduler

_registered = Scheduler._registered


def _crash(self: Scheduler, event: Any, now_ns: int) -> Any:
    if event.hello.name == "crash":
        raise RuntimeError("made-up mistake")
    if event.hello.name == "hang":
        end = Path(os.environ["HANG_UNTIL"])
        end.with_suffix(".began").touch()
        while not end.exists():
            threading.Event().wait(0.01)
    return _registered(self, event, now_ns)


if __name__ == "__main__":
    import sys

    import made_up_gpus  # type: ignore[import-not-found]  # beside this program

    Scheduler._registered = _crash  # type: ignore[method-assign]
    count = int(sys.argv[1])
    devices = [
        made_up_gpus.Device(index, made_up_gpus.uuid_of(index), "made-up GPU", 8 << 30) for index in range(count)
    ]
    made_up_gpus.serve_devices(sys.argv[2:], devices)
