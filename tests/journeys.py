"""Counts the functions and files that one message passes: `python -m tests.journeys`.

The count includes the dispatcher, the codec, the engine and the policy, without the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.scheduler_policies import registry

GPU: Final = "GPU-0"
GIB: Final = 1 << 30


class _Shell:
    """Stands in for the transport and the journal."""

    def __init__(self) -> None:
        self.sent: list[messages.Message | int] = []

    def send(self, connection: int, frame: bytes) -> None:
        self.sent.append(messages.decode(frame, messages.TO_CLIENT))

    def greeted(self, connection: int) -> None: ...

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        raise AssertionError(text)

    def peer(self, connection: int) -> Peer:
        return Peer(process_id=connection, user_id=1000)

    def record(self, uuid: str, lease_id: int, process_id: int) -> None: ...

    def forget(self, process_id: int) -> None: ...


def passed(journey: Callable[[], object]) -> tuple[int, dict[str, set[str]]]:
    """Calls, and the names of the functions by file."""
    calls, found = 0, dict[str, set[str]]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if event == "call" and ("/coordinator/" in code.co_filename or "/scheduler_policies/" in code.co_filename):
            calls += 1
            found.setdefault(code.co_filename, set()).add(f"{code.co_qualname}:{code.co_firstlineno}")

    sys.setprofile(note)
    try:
        journey()
    finally:
        sys.setprofile(None)
    return calls, found


class Node:
    """A dispatcher with one GPU."""

    def __init__(self, policy: str = "auto", sharing: Sharing = Sharing.AUTO) -> None:
        self.shell = _Shell()
        scheduler = Scheduler(registry.create, Settings(policy=policy, sharing=sharing))
        self.dispatcher = Dispatcher(scheduler, self.shell, self.shell, Rights(own_user=0), max_clients=8)
        self.now_ns = 1_000_000_000
        self.dispatcher.event(events.GpuAdded(GPU, GPU, 80 * GIB, 80 * GIB), self.now_ns)

    def client(self, number: int) -> None:
        version, mode = messages.PROTOCOL_VERSION, int(messages.MemoryMode.SWAP)
        hello = messages.Hello(version, f"c{number}", "python", number, mode, 0, "0")
        self.give(number, hello)
        self.give(number, messages.AttachGpu(0, GPU, 80 * GIB, 0, False, 0, 0, 0))

    def give(self, number: int, message: messages.Message) -> None:
        self.now_ns += 1_000_000
        self.dispatcher.frame(number, messages.encode(message), self.now_ns)

    def journey(self, number: int, message: messages.Message) -> tuple[int, dict[str, set[str]]]:
        frame = messages.encode(message)
        self.now_ns += 1_000_000
        return passed(lambda: self.dispatcher.frame(number, frame, self.now_ns))


def journeys() -> dict[str, tuple[int, dict[str, set[str]]]]:
    """Each journey by its name."""
    found = {}
    node = Node()
    node.client(1)
    found["Request to Grant, one client"] = node.journey(1, messages.Request(0))
    assert any(isinstance(message, messages.Grant) for message in node.shell.sent)
    lease = next(message.lease_id for message in node.shell.sent if isinstance(message, messages.Grant))
    node.client(2)
    found["Request to Grant, second client under auto"] = node.journey(2, messages.Request(0))
    at_ns = node.now_ns
    node.give(1, messages.Progress(0, lease, at_ns, 10, 0, 0, 0))
    found["Progress"] = node.journey(1, messages.Progress(0, lease, at_ns + 1000, 11, 0, 0, 0))
    return found


def main() -> None:
    """Prints the journeys; with `-v` their functions too."""
    for name, (calls, found) in journeys().items():
        functions = sum(len(names) for names in found.values())
        print(f"{name}: {functions} functions in {len(found)} files, {calls} calls")
        if "-v" in sys.argv:
            for file, names in sorted(found.items()):
                print(f"  {Path(file).parent.name}/{Path(file).name}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
