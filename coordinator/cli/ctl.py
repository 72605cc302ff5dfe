"""`nvshare-ctl`: shows and tunes a running coordinator.

Exit codes: 0 done, 1 refused, 2 wrong command line, 3 no coordinator.  With --json, standard output gets one JSON
object, also for an error: `{"error": {"code", "text"}}`.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nvshare.coordinator.cli import ctl_settings, ctl_slot, ctl_wait
from nvshare.coordinator.cli.ctl_call import (
    ClientName,
    Gpu,
    Json,
    Where,
    call,
    call_and_wait,
    check_reachable,
    client_name,
    directory_of,
    make_request,
    refusals,
    run,
    say,
    until_interrupted,
)
from nvshare.coordinator.cli.doctor.command import doctor
from nvshare.coordinator.cli.install import command as install
from nvshare.coordinator.cli.jupyter import kernelspec
from nvshare.coordinator.cli.top import command as top
from nvshare.coordinator.cli.trace import command as trace
from nvshare.coordinator.cli.usage import usage
from nvshare.coordinator.cli.views.output import Output, Watch, show, with_period
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import EventReader, NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.system.version import VersionOption, run_command

app = typer.Typer(
    no_args_is_help=True,
    help="Show and tune the coordinator that shares this node's GPUs.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(context: typer.Context, where: Where = None, version: VersionOption = False) -> None:
    context.obj = where


def _view(name: str, about: str) -> None:
    """Adds a command that shows a `status`."""

    def command(
        context: typer.Context, form: Output = None, watch: Watch = None, as_json: Json = False, where: Where = None
    ) -> None:
        lines = importlib.import_module(f"nvshare.coordinator.cli.views.{name}").lines
        show(context, where, lines, form=form, as_json=as_json, every_s=watch)

    app.command(name, help=about)(command)


_view("status", "Show the GPUs with their lease holders, waiting clients, settings and gangs.")
_view("clients", "Show the programs that share the GPUs.")


@app.command()
def explain(context: typer.Context, gpu: Gpu = None, as_json: Json = False, where: Where = None) -> None:
    """Say why the programs of each GPU run side by side or in turns."""
    from nvshare.coordinator.cli.views.explain import explanation, lines

    with refusals(as_json):
        found = call(directory_of(context, where), api.Status())
        gpus = explanation(found, gpu)
    typer.echo(json.dumps({"gpus": gpus}) if as_json else "\n".join(lines(gpus, found["now_ns"])))


_view("memory", "Show each client's memory on the GPU and on the host, and the memory moved.")
_view("slots", "Show the slots: parts of GPUs for pods, jobs and users.")


@app.command()
def events(
    context: typer.Context,
    count: Annotated[int | None, typer.Option(min=1, help="stop after this number of events")] = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Print what happens as it happens; with --json the events themselves, one object a line."""
    directory = directory_of(context, where)
    with refusals(as_json), until_interrupted():
        check_reachable(directory)
        reader = EventReader(directory.events_socket)
        line = json.dumps if as_json else _narrator(directory)
        _follow(reader, count, line)


def _narrator(directory: RuntimeDir) -> Callable[[dict[str, Any]], str]:
    """Turns events into lines; asks for the names of GPUs and programs."""
    from nvshare.coordinator.cli.views.events import Narrator

    return Narrator(call(directory, api.Status()), time.time_ns() - time.monotonic_ns()).line


def _follow(reader: EventReader, count: int | None, line: Callable[[dict[str, Any]], str]) -> None:
    left = count
    try:
        for frame in reader.frames():
            sys.stdout.write(line(api.decode_event(frame)) + "\n")
            sys.stdout.flush()
            if left is not None:
                left -= 1
                if left == 0:
                    return
    finally:
        reader.close()
    raise NoCoordinatorError("the coordinator has ended")


ctl_settings.register(app)
top.register(app)
trace.register(app)
app.command()(usage)
app.command()(doctor)
app.add_typer(install.app, name="install")
app.command("install-unit", hidden=True)(install.install_unit)  # its name before `install` had more to install
app.add_typer(kernelspec.app, name="kernelspec")
app.add_typer(ctl_slot.app, name="slot")
app.command("wait")(ctl_wait.wait)


@app.command()
def pause(context: typer.Context, client: ClientName, as_json: Json = False, where: Where = None) -> None:
    """Stop granting leases to a client until `resume`."""
    request = make_request(api.Pause, client=client)
    run(context, where, as_json, request, lambda result: say(f"{client_name(result)} is paused", result))


@app.command()
def resume(context: typer.Context, client: ClientName, as_json: Json = False, where: Where = None) -> None:
    """End a pause."""
    request = make_request(api.Resume, client=client)
    run(context, where, as_json, request, lambda result: say(f"{client_name(result)} is resumed", result))


@app.command()
def park(context: typer.Context, client: ClientName, as_json: Json = False, where: Where = None) -> None:
    """Take an idle client off its GPUs altogether; it comes back at its next call, or by `unpark`."""
    _park(context, client, True, as_json, where)


@app.command()
def unpark(context: typer.Context, client: ClientName, as_json: Json = False, where: Where = None) -> None:
    """Bring a parked client back to its GPUs."""
    _park(context, client, False, as_json, where)


@app.command()
def migrate(
    context: typer.Context,
    client: ClientName,
    to: Annotated[str, typer.Option("--to", metavar="GPU", help="Its index, or the beginning of its UUID.")],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Move a client to another GPU of the same model, where it goes on."""
    result = _waited_for(context, api.MigrateClient, as_json, where, client=client, gpu=to)
    _report(result, result["gpu"] in result["gpus"] and not result["why"], f"on GPU {to}", as_json)


def _park(context: typer.Context, client: str, parked: bool, as_json: bool, where: Path | None) -> None:
    result = _waited_for(context, api.ParkClient, as_json, where, client=client, parked=parked)
    state = "parked" if parked else "running"
    _report(result, result["parking"] == state, state, as_json)


def _waited_for(
    context: typer.Context, kind: type[api.Request], as_json: bool, where: Path | None, **values: Any
) -> dict[str, Any]:
    with refusals(as_json):
        return call_and_wait(directory_of(context, where), make_request(kind, **values))


def _report(result: dict[str, Any], done: bool, state: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
    else:
        why = f": {result['why']}" if result["why"] else ""
        typer.echo(f"{client_name(result)} {'is' if done else 'is not'} {state}{why}")
    if not done:
        raise typer.Exit(1)


@app.command()
def end(
    context: typer.Context,
    client: ClientName,
    kill: Annotated[bool, typer.Option("--kill", help="by SIGKILL, for a program that ignores SIGTERM")] = False,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """End a client's process (SIGTERM): one's own, or any as root or the coordinator's user."""
    signal = "SIGKILL" if kill else "SIGTERM"
    request = make_request(api.EndClient, client=client, kill=kill)
    told = "{name} (pid {process_id}) got " + signal
    run(context, where, as_json, request, lambda result: typer.echo(told.format(**result)))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(app, with_period(list(sys.argv[1:] if argv is None else argv)), "nvshare-ctl")


if __name__ == "__main__":
    main()
