"""As made_up_gpus.py, with mistakes of our own: a client named `crash` makes the core raise.

One named `hang` makes `$HANG_UNTIL.began` and blocks the loop until the file `$HANG_UNTIL` exists.
"""

import os
import threading
from pathlib import Path
from typing import Any

from nvshare.coordinator.engine.scheduler import Scheduler
from tests.daemon import made_up_gpus

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
    Scheduler._registered = _crash  # type: ignore[method-assign]
    made_up_gpus.main()
