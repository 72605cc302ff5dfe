"""How `nvshare-ctl park`, `unpark` and `migrate` wait, with a coordinator that answers from a list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvshare.coordinator.cli import ctl_call
from nvshare.coordinator.cli.ctl_call import call_and_wait
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.system.runtime_dir import RuntimeDir

PARK, UNPARK = api.ParkClient(client="train"), api.ParkClient(client="train", parked=False)
MOVE = api.MigrateClient(client="train", gpu="1")
BUSY = ControlError("busy", "ask less often")
Settle = Callable[..., dict[str, Any]]


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch) -> Settle:
    """`settle(request, *states, stopped=False)`: the coordinator answers with these states, the last one for ever."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def settle(request: api.Request, *states: str | ControlError, stopped: bool = False) -> dict[str, Any]:
        left = list(states)

        def call(directory: RuntimeDir, asked: api.Request) -> dict[str, Any]:
            state = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(state, ControlError):
                raise state
            if asked is request:
                return {"client": 7, "process_id": 123, "parking": state, "why": "", "moves_to": "", "gpus": []}
            return {"clients": [{"client": 7, "parking": state, "parking_why": "", "moves_to": "", "seats": []}]}

        monkeypatch.setattr(ctl_call, "call", call)
        monkeypatch.setattr(ctl_call, "is_stopped", lambda process_id: stopped)
        return call_and_wait(RuntimeDir(Path("/nowhere")), request)

    monkeypatch.setattr(ctl_call, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s))
    return settle


def test_its_own_looks_refuse_it_nothing(settle: Settle) -> None:
    """Broken: a user is told `busy` because the command looks too often, although the program is parked."""
    assert settle(PARK, BUSY, "leaving", BUSY, BUSY, "saving", "parked")["parking"] == "parked"
    with pytest.raises(ControlError, match="less often"):
        settle(PARK, BUSY)


@pytest.mark.parametrize(("request_", "verb"), [(PARK, "parks"), (UNPARK, "comes back"), (MOVE, "moves")])
def test_a_stopped_program_is_not_waited_for(settle: Settle, request_: api.Request, verb: str) -> None:
    """Broken: the command hangs, without a word, for as long as a debugger stops the program."""
    told = settle(request_, "leaving", stopped=True)
    assert told["why"] == f"it is stopped (SIGSTOP or a debugger); it {verb} when it continues"


def test_a_wait_has_an_end_and_a_reason(settle: Settle) -> None:
    """Broken: the command waits without bound, or says that a program is not parked and not why."""
    assert settle(PARK, "saving")["why"] == "it is still saving; see `nvshare-ctl clients`"
    assert settle(PARK, "saving", "waking", "running")["why"] == "a call of the program has brought it back"
    assert settle(UNPARK, "waking", "running")["why"] == ""
