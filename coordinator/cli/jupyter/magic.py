"""`%gpu` in a notebook: what its kernel has of the GPUs, its class, and giving the GPU back.

Invariants: a coordinator that does not answer, or does not let this user look, leaves what the hook itself knows.
No command raises: a notebook that is run as a whole goes on.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from nvshare.client_hook import api as hook
from nvshare.client_hook import steps
from nvshare.client_hook.api import Lease
from nvshare.coordinator.cli.ctl_call import call, call_and_wait
from nvshare.coordinator.cli.views import words
from nvshare.coordinator.cli.views.explain import class_name
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.model.profile import JOB_CLASS
from nvshare.coordinator.system.runtime_dir import client_directory
from nvshare.coordinator.units import count, format_size

USAGE: Final = """\
%gpu                  this notebook's GPUs: lease, wait, memory, progress
%gpu class NAME       what kind of program it is: interactive, batch or best-effort
%gpu release          frees unused memory of CuPy and PyTorch, and gives the GPU to a program that waits
%gpu park             leaves the GPU altogether until the next cell that uses it, contexts included
%gpu autorelease off  keeps that memory also when the GPU is short of memory; on, the default, frees it after a cell"""
_LEASES: Final = {
    Lease.NONE: "idle",
    Lease.WAITING: "waits",
    Lease.HELD: "has the GPU",
    Lease.RETURNING: "gives the GPU back",
    Lease.FREE: "runs without a coordinator",
    Lease.UNMANAGED: "is not shared",
}


def load(shell: Any) -> None:
    """Registers the magic with an IPython shell, and the release of caches between its cells."""
    shell.register_magic_function(gpu, magic_kind="line", magic_name="gpu")
    shell.events.register("post_run_cell", _after_cell)
    steps.on_pressure(_release_caches)


def _after_cell(_: object) -> None:
    steps.between_cells()


def _release_caches() -> None:
    if _releases:
        steps.release_caches()


def gpu(line: str) -> None:
    """Shows this notebook's GPUs; `%gpu help` lists the commands."""
    try:
        _print(_command(shlex.split(line)))
    except (ControlError, NoCoordinatorError, ValueError) as error:
        _print(f"nvshare: {error}")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _command(words: list[str]) -> str:
    if not hook.loaded():
        return str(hook.HookNotLoadedError())
    match words:
        case []:
            return "\n".join(report())
        case ["class", name] if name.replace("-", "_") in JOB_CLASS.words:
            call(client_directory(), api.Set(setting="class", client=str(os.getpid()), value=name.replace("-", "_")))
            return f"this notebook is {name} from now on"
        case ["release"]:
            return release()
        case ["park"]:
            return park()
        case ["autorelease", "on" | "off" as chosen]:
            return autorelease(chosen == "on")
        case _:
            return USAGE


# --- the report -------------------------------------------------------------------------------------------------------


def report() -> Iterator[str]:
    """A line for each GPU that this process has used."""
    try:
        status = call(client_directory(), api.Status())
    except (ControlError, NoCoordinatorError) as error:
        yield from _own_report()
        yield f"(only what this notebook knows itself: {error})"
        return
    own = [client for client in status["clients"] if client["process_id"] == os.getpid()]
    if not own or not own[0]["seats"]:
        yield "this notebook has not used a GPU yet"
        return
    for seat in own[0]["seats"]:
        yield _line(own[0], seat, status)


def _line(client: Mapping[str, Any], seat: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    card = next(each for each in status["gpus"] if each["uuid"] == seat["uuid"])
    because = "" if seat["reason"] == "parking" else words.why(client, seat, status)  # the state says it
    parts = [words.state(client, seat, status["now_ns"]) + (f": {because}" if because else "")]
    others = card["waiting"] - (seat["waiting_since_ns"] is not None)
    parts.append(f"{count(others, 'other program')} waiting")
    limit = f" of {format_size(seat['limit_bytes'])}" if seat["limit_bytes"] else ""
    parts.append(
        f"memory {format_size(seat['allocated_bytes'])}{limit}, on the card {format_size(seat['resident_bytes'])}"
    )
    if seat["progress_normalised"] >= 0.01:
        parts.append(f"speed {seat['progress_normalised']:.0%} of alone")
    parts.append(f"class {class_name(client)}")
    return f"GPU {card['index']} ({card['name']}): {'; '.join(parts)}"


def _used() -> Iterator[tuple[int, hook.GpuState]]:
    """The GPUs that the hook has gated calls of."""
    for ordinal in range(hook.MOST_GPUS):
        state = hook.state(ordinal)
        if state.calls or state.allocated_bytes or state.lease not in (Lease.NONE, Lease.UNMANAGED):
            yield ordinal, state


def _own_report() -> Iterator[str]:
    for ordinal, state in _used():
        memory = f"memory {format_size(state.allocated_bytes)}, on the card {format_size(state.resident_bytes)}"
        yield f"GPU {ordinal}: {_LEASES[state.lease]}; {memory}"


# --- giving back ------------------------------------------------------------------------------------------------------


def release() -> str:
    """Frees the caches of loaded libraries, and gives each GPU to a program that waits."""
    freed = steps.release_caches()
    for ordinal, _ in _used():
        hook.yield_lease(ordinal)
    caches = f"unused memory of {' and '.join(freed)} is free; " if freed else ""
    return f"{caches}a program that waits gets the GPU now"


def park() -> str:
    """Asks to be taken off the GPU, and waits for it.  Nothing here needs the GPU meanwhile."""
    told = call_and_wait(client_directory(), api.ParkClient(client=str(os.getpid())))
    return "this notebook is off the GPU" if told["parking"] == "parked" else f"it stays on the GPU: {told['why']}"


_releases = True


def autorelease(chosen: bool) -> str:
    """Whether the caches are freed between cells when the GPU is short of memory."""
    global _releases
    _releases = chosen
    return f"unused memory {'is freed after a cell' if chosen else 'stays'} when the GPU is short of memory"
