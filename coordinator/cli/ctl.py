"""`nvshare-ctl`: look at a running coordinator and tune it.

Exit codes: 0 done, 1 refused, 2 wrong command line, 3 no coordinator.  With --json one JSON object goes to standard
output, an error (`{"error": {"code", "text"}}`) too.

May not go here: what a request does (daemon/control_server.py), how tables look (cli/ctl_view.py).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from nvshare.coordinator.daemon import control_api as api
from nvshare.coordinator.daemon.control_api import ControlError
from nvshare.coordinator.daemon.control_sockets import ControlCaller, EventReader, NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import MAX_SOCKET_PATH_BYTES, RuntimeDir, client_directory, foreign_text
from nvshare.coordinator.units import format_duration, format_share, format_size, parse_quantum, parse_share, parse_size

REFUSED: Final = 1
USAGE: Final = 2
NO_COORDINATOR: Final = 3

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Shows and tunes the coordinator that shares this node's GPUs.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
settings = typer.Typer(no_args_is_help=True, help="Change something while programs run; it lasts until it is unset.")
app.add_typer(settings, name="set")

Json = Annotated[bool, typer.Option("--json", help="one JSON object instead of text")]
Where = Annotated[Path | None, typer.Option("--runtime-dir", help="the coordinator's directory")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="index, UUID or its beginning; all GPUs without it")]
ClientName = Annotated[str, typer.Argument(metavar="CLIENT", help="id, process id or name, as `clients` shows them")]


@app.callback()
def _root(context: typer.Context, where: Where = None) -> None:
    context.obj = where


def directory_of(context: typer.Context, where: Path | None) -> RuntimeDir:
    """The directory named with the command or before it, else where clients look."""
    named = where or context.obj
    return RuntimeDir(named.absolute()) if named is not None else client_directory()


def check_reachable(directory: RuntimeDir) -> None:
    """Raises NoCoordinatorError at once where libzmq would try for ever."""
    path = directory.control_socket
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise NoCoordinatorError(f"{path} is too long for a socket; name another --runtime-dir")
    if not directory.may_be_foreign and directory.is_foreign():
        raise ControlError("permission", foreign_text(directory, directory.path.lstat().st_uid))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(5)
            probe.connect(os.fspath(path))
        except PermissionError:
            text = f"the coordinator in {directory.path} belongs to another user; only that user and root control it"
            raise ControlError("permission", text) from None
        except OSError:
            raise NoCoordinatorError(
                f"no coordinator runs in {directory.path}; start nvshare-coordinator, run something with nvshare-run, "
                "or name its directory with --runtime-dir"
            ) from None


def call(directory: RuntimeDir, request: api.Request) -> Any:
    """Raises ControlError and NoCoordinatorError."""
    check_reachable(directory)
    caller = ControlCaller(directory.control_socket)
    try:
        return api.decode_reply(caller.call(api.encode_request(request)))
    finally:
        caller.close()


def _run(
    context: typer.Context, where: Path | None, as_json: bool, request: api.Request, show: Callable[[Any], None]
) -> None:
    try:
        result = call(directory_of(context, where), request)
    except (ControlError, NoCoordinatorError) as error:
        _fail(error, as_json)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show(result)


def _fail(error: ControlError | NoCoordinatorError, as_json: bool) -> NoReturn:
    if isinstance(error, ControlError):
        code, name, text = REFUSED, error.code, error.text
    else:
        code, name, text = NO_COORDINATOR, "no_coordinator", str(error)
    if as_json:
        typer.echo(json.dumps({"error": {"code": name, "text": text}}))
    else:
        typer.echo(f"nvshare-ctl: {text}", err=True)
    raise typer.Exit(code)


# --- looking --------------------------------------------------------------------------------------------------------


@app.command()
def status(context: typer.Context, as_json: Json = False, where: Where = None) -> None:
    """The GPUs: who holds them, who waits, how they are shared; the gangs."""
    from nvshare.coordinator.cli.ctl_view import show_status

    _run(context, where, as_json, api.Status(), show_status)


@app.command()
def clients(context: typer.Context, as_json: Json = False, where: Where = None) -> None:
    """The programs that share the GPUs."""
    from nvshare.coordinator.cli.ctl_view import show_clients

    _run(context, where, as_json, api.Status(), show_clients)


@app.command()
def memory(context: typer.Context, as_json: Json = False, where: Where = None) -> None:
    """What of each client is on the GPU and what on the host, and what was moved."""
    from nvshare.coordinator.cli.ctl_view import show_memory

    _run(context, where, as_json, api.Status(), show_memory)


@app.command()
def slots(context: typer.Context, as_json: Json = False, where: Where = None) -> None:
    """Kubernetes: the slots of this node, and whose they are."""
    from nvshare.coordinator.cli.ctl_slots import show_slots

    _run(context, where, as_json, api.Status(), show_slots)


@app.command()
def events(
    context: typer.Context,
    count: Annotated[int | None, typer.Option(min=1, help="stop after so many")] = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """What happens, as it happens; with --json one object a line."""
    directory = directory_of(context, where)
    try:
        check_reachable(directory)
        _follow(EventReader(directory.events_socket), count, as_json)
    except (ControlError, NoCoordinatorError) as error:
        _fail(error, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except BrokenPipeError:  # the reader of our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _follow(reader: EventReader, count: int | None, as_json: bool) -> None:
    from nvshare.coordinator.cli.ctl_view import event_line

    left = count
    try:
        for frame in reader.frames():
            event = api.decode_event(frame)
            sys.stdout.write((json.dumps(event) if as_json else event_line(event)) + "\n")
            sys.stdout.flush()
            if left is not None:
                left -= 1
                if left == 0:
                    return
    finally:
        reader.close()
    raise NoCoordinatorError("the coordinator went away")


# --- changing -------------------------------------------------------------------------------------------------------


@settings.command("quantum")
def set_quantum(
    context: typer.Context,
    quantum: Annotated[str, typer.Argument(help="250ms, 2s, auto")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """How long a turn lasts."""
    value = _parsed(parse_quantum, quantum, "QUANTUM")
    shown = "auto" if value is None else format_duration(value)
    request = api.SetQuantum(quantum_ns=value, gpu=gpu)
    _run(context, where, as_json, request, lambda result: _say(f"quantum is {shown} on {_gpus(result)}", result))


@settings.command("policy")
def set_policy(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="round_robin, priority, fair_share, or one that a package brings")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Who decides who runs next."""
    request = _request(api.SetPolicy, policy=policy, gpu=gpu)
    _run(context, where, as_json, request, lambda result: _say(f"policy is {policy} on {_gpus(result)}", result))


@settings.command("sharing")
def set_sharing(
    context: typer.Context,
    sharing: Annotated[str, typer.Argument(help="exclusive or concurrent")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """In turns, or all at once."""
    request = _request(api.SetSharing, sharing=sharing, gpu=gpu)
    _run(context, where, as_json, request, lambda result: _say(f"sharing is {sharing} on {_gpus(result)}", result))


@settings.command("priority", context_settings={"ignore_unknown_options": True})
def set_priority(
    context: typer.Context,
    client: ClientName,
    priority: Annotated[int, typer.Argument(help="higher runs first, under a policy that knows it")],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """A client's rank."""
    request = _request(api.SetPriority, client=client, priority=priority)
    _run(context, where, as_json, request, lambda result: _say(f"{_client(result)} has priority {priority}", result))


@settings.command("weight")
def set_weight(
    context: typer.Context,
    client: ClientName,
    weight: Annotated[int, typer.Argument(help="1 to 10000: its part of the time under the policy fair_share")],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """A client's share of the time."""
    request = _request(api.SetWeight, client=client, weight=weight)
    _run(context, where, as_json, request, lambda result: _say(f"{_client(result)} has weight {weight}", result))


@settings.command("limit")
def set_limit(
    context: typer.Context,
    client: ClientName,
    limit: Annotated[str, typer.Argument(help="4GiB, 512MiB; 0 lifts the limit")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """How much GPU memory a client may allocate."""
    value = _parsed(parse_size, limit, "LIMIT")
    request = _request(api.SetLimit, client=client, limit_bytes=value, gpu=gpu)
    _run(context, where, as_json, request, _say_limit)


@app.command()
def limit(
    context: typer.Context,
    client: ClientName,
    memory: Annotated[str, typer.Option(help="what it may allocate: 4GiB; 0 lifts the limit")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Bound what a client has, while it runs."""
    size = _parsed(parse_size, memory, "--memory")
    _run(context, where, as_json, _request(api.SetLimit, client=client, limit_bytes=size, gpu=gpu), _say_limit)


@app.command()
def unset(
    context: typer.Context,
    setting: Annotated[
        str | None,
        typer.Argument(help="quantum, policy, sharing, switch-share, host-budget; priority, weight, limit, ... CLIENT"),
    ] = None,
    client: Annotated[str | None, typer.Argument(metavar="CLIENT", help="of one client only")] = None,
    gpu: Gpu = None,
    everything: Annotated[bool, typer.Option("--all", help="all that was set live")] = False,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Undo what was set live: the settings, or the program itself, decide again."""
    if everything == (setting is not None):
        raise typer.BadParameter("name a setting or --all")
    name = None if setting is None else setting.replace("-", "_")
    request = _request(api.Unset, setting=name, client=client, gpu=gpu)
    _run(context, where, as_json, request, _say_undone)


def _say_undone(result: dict[str, Any]) -> None:
    from nvshare.coordinator.cli.ctl_view import live_lines

    for line in live_lines(result["undone"]):
        _say(f"undone: {line}", result)


def _say_limit(result: dict[str, Any]) -> None:
    size, used = result["limit_bytes"], result["allocated_bytes"]
    shown = format_size(size) if size else "no limit"
    more = f"; it has {format_size(used)} already, so nothing more can be allocated" if size and used > size else ""
    _say(f"{_client(result)} has {shown} of GPU memory{more}", result)


@settings.command("host-budget")
def set_host_budget(
    context: typer.Context,
    budget: Annotated[str, typer.Argument(help="64GiB")],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Pinned host memory that all clients may have together."""
    request = _request(api.SetHostBudget, budget_bytes=_parsed(parse_size, budget, "BUDGET"))
    _run(context, where, as_json, request, _say_budget)


def _say_budget(result: dict[str, Any]) -> None:
    budget, shared = result["host_budget_bytes"], result["host_shared_bytes"]
    more = ", so nothing more is given until some has come back" if shared > budget else ""
    _say(f"host budget is {format_size(budget)}; {format_size(shared)} of it are out{more}", result)


@settings.command("switch-share")
def set_switch_share(
    context: typer.Context,
    share: Annotated[str, typer.Argument(help="5%, 2%")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Automatic quantum: the share of time that switching may cost."""
    value = _parsed(parse_share, share, "SHARE")
    request = _request(api.SetSwitchShare, share=value, gpu=gpu)
    text = f"switching may cost {format_share(value)}"
    _run(context, where, as_json, request, lambda result: _say(f"{text} on {_gpus(result)}", result))


@app.command()
def pause(context: typer.Context, client: ClientName, as_json: Json = False, where: Where = None) -> None:
    """Let a client wait until it is resumed."""
    request = _request(api.Pause, client=client)
    _run(context, where, as_json, request, lambda result: _say(f"{_client(result)} is paused", result))


@app.command()
def resume(context: typer.Context, client: ClientName, as_json: Json = False, where: Where = None) -> None:
    """End a pause."""
    request = _request(api.Resume, client=client)
    _run(context, where, as_json, request, lambda result: _say(f"{_client(result)} goes on", result))


def _request(kind: Callable[..., api.Request], **fields: Any) -> api.Request:
    """Bounds are the protocol's; what breaks them is a wrong command line."""
    try:
        return kind(**fields)
    except ValueError as error:
        details: list[dict[str, Any]] = getattr(error, "errors", list)()
        raise typer.BadParameter("; ".join(f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in details)) from None


def _parsed(parse: Callable[[str], Any], text: str, name: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


def _say(text: str, result: dict[str, Any]) -> None:
    """What was done; and when it ends, where it does not last."""
    typer.echo(f"{text}; it ends {result['ends']}" if "ends" in result else text)


def _gpus(result: dict[str, Any]) -> str:
    return ", ".join(result["gpus"])


def _client(result: dict[str, Any]) -> str:
    if "slot" in result:
        return f"slot {result['slot']} (client {result['client']}, {result['name']}, and all others in it)"
    return f"client {result['client']} ({result['name']}, pid {result['process_id']})"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    app(list(sys.argv[1:] if argv is None else argv), prog_name="nvshare-ctl")


if __name__ == "__main__":
    main()
