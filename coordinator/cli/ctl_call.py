"""One request of `nvshare-ctl` to a coordinator: options common to all commands, the call, and its result or error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import ControlCaller, NoCoordinatorError
from nvshare.coordinator.system.journal import is_stopped
from nvshare.coordinator.system.runtime_dir import RuntimeDir, client_directory, connect_error, foreign_text

REFUSED: Final = 1
NO_COORDINATOR: Final = 3
FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.25
"""Between looks at a program that parks or moves."""
STOPPED_S: Final = 1.0
"""A program that is stopped for longer is not waited for."""
LONGEST_WAIT_S: Final = 300.0
"""More than the largest program takes to a slow host."""
BUSY_S: Final = 10.0

Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
Where = Annotated[Path | None, typer.Option("--runtime-dir", help="runtime directory of the coordinator")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="index, UUID or its beginning; default: all GPUs")]


def complete_client(context: typer.Context) -> list[str]:
    """Completions of CLIENT."""
    try:
        status = call(directory_of(context, context.params.get("where")), api.Status())
    except (ControlError, NoCoordinatorError):
        return []
    return sorted({client["name"] for client in status["clients"]})


ClientName = Annotated[
    str,
    typer.Argument(
        metavar="CLIENT",
        help="id (c12), process id or name, as `clients` shows them",
        autocompletion=complete_client,
    ),
]


def directory_of(context: typer.Context, where: Path | None) -> RuntimeDir:
    """The directory named after or before the command, else the default of clients."""
    named = where or context.obj
    return RuntimeDir(named.absolute()) if named is not None else client_directory()


def check_reachable(directory: RuntimeDir) -> None:
    """Raises ControlError or NoCoordinatorError at once, where libzmq would retry forever."""
    if not directory.may_be_foreign and directory.is_foreign():
        raise ControlError("permission", foreign_text(directory, directory.path.lstat().st_uid))
    error = connect_error(directory.control_socket)
    if error == errno.ENAMETOOLONG:
        raise NoCoordinatorError(f"{directory.control_socket} is too long for a socket; name another --runtime-dir")
    if error == errno.EACCES:
        text = f"the coordinator in {directory.path} belongs to another user; only that user and root control it"
        raise ControlError("permission", text)
    if error not in (0, errno.EAGAIN):
        if reason := directory.waiting_reason():
            raise NoCoordinatorError(f"the coordinator in {directory.path} does not serve yet: {reason}")
        raise NoCoordinatorError(
            f"no coordinator runs in {directory.path}; start nvshare-coordinator, run a program with nvshare-run, "
            "or name the directory with --runtime-dir"
        )


def call(directory: RuntimeDir, request: api.Request) -> Any:
    """The result of a request.  Raises ControlError and NoCoordinatorError."""
    check_reachable(directory)
    caller = ControlCaller(directory.control_socket)
    try:
        return api.decode_reply(caller.call(api.encode_request(request)))
    finally:
        caller.close()


def call_and_wait(directory: RuntimeDir, request: api.Request) -> dict[str, Any]:
    """`call` for parking and migration: waits until the client is parked or runs, and moves to no GPU.

    It does not wait for a client that is stopped, nor longer than `LONGEST_WAIT_S`; `why` then says so.
    """
    result: dict[str, Any] = call_patiently(directory, request)
    parks = isinstance(request, api.ParkClient) and request.parked
    pause_s, stopped_s, end_s = FIRST_PAUSE_S, 0.0, time.monotonic() + LONGEST_WAIT_S
    while result["parking"] not in ("parked", "running", "gone") or result["moves_to"]:
        stopped_s = stopped_s + pause_s if is_stopped(result["process_id"]) else 0.0
        if stopped_s >= STOPPED_S:
            verb = "parks" if parks else "comes back" if isinstance(request, api.ParkClient) else "moves"
            return {**result, "why": f"it is stopped (SIGSTOP or a debugger); it {verb} when it continues"}
        if time.monotonic() >= end_s:
            return {**result, "why": f"it is still {result['parking']}; see `nvshare-ctl clients`"}
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        status = call_patiently(directory, api.Status())
        result.update(parking="gone", why="it has ended", moves_to="", gpus=[])
        for each in status["clients"]:
            if each["client"] == result["client"]:
                result.update(parking=each["parking"], why=each["parking_why"], moves_to=each["moves_to"])
                result.update(gpus=[seat["uuid"] for seat in each["seats"]])
    if parks and result["parking"] == "running":
        result["why"] = result["why"] or "a call of the program has brought it back"
    return result


def call_patiently(directory: RuntimeDir, request: api.Request) -> Any:
    """`call`, again if the coordinator has no time for this user's requests just now."""
    end_s = time.monotonic() + BUSY_S
    while True:
        try:
            return call(directory, request)
        except ControlError as error:
            if error.code != "busy" or time.monotonic() >= end_s:
                raise
        time.sleep(LONGEST_PAUSE_S)


def run(
    context: typer.Context, where: Path | None, as_json: bool, request: api.Request, show: Callable[[Any], None]
) -> None:
    """Sends a request and shows its result; ends the command after an error."""
    with refusals(as_json):
        result = call(directory_of(context, where), request)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show(result)


@contextlib.contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """The command ends with one line when a coordinator refuses a request in the block, or none runs."""
    try:
        yield
    except (ControlError, NoCoordinatorError) as error:
        fail(error, as_json)


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """The command ends in order by Ctrl-C, and when the reader of standard output has ended."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def fail(error: ControlError | NoCoordinatorError, as_json: bool) -> NoReturn:
    """Prints an error and ends the command with its exit code."""
    if isinstance(error, ControlError):
        code, name, text = REFUSED, error.code, error.text
    else:
        code, name, text = NO_COORDINATOR, "no_coordinator", str(error)
    if as_json:
        typer.echo(json.dumps({"error": {"code": name, "text": text}}))
    else:
        typer.echo(f"nvshare-ctl: {text}", err=True)
    raise typer.Exit(code)


def say(text: str, result: dict[str, Any]) -> None:
    """Prints a result, with the end of a setting that does not last."""
    typer.echo(f"{text}; it ends {result['ends']}" if "ends" in result else text)


def make_request(kind: Callable[..., api.Request], **fields: Any) -> api.Request:
    """A request.  Fields outside the protocol's bounds are a wrong command line."""
    try:
        return kind(**fields)
    except ValueError as error:
        raise typer.BadParameter(api.problem(error)) from None


def parse_argument(parse: Callable[[str], Any], text: str, name: str) -> Any:
    """The value of an argument.  A faulty one is a wrong command line."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


def gpu_names(result: dict[str, Any]) -> str:
    """The changed GPUs of a result."""
    return ", ".join(f"GPU {index}" for index in result["indices"])


def client_name(result: dict[str, Any]) -> str:
    """The changed client of a result, or its whole slot."""
    if "slot" in result:
        return f"slot {result['slot']} (client c{result['client']}, {result['name']}, and all others in it)"
    return f"client c{result['client']} ({result['name']}, pid {result['process_id']})"
