"""The commands of `nvshare-ctl` that change settings: `set`, `limit` and `unset`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from nvshare.coordinator.cli.ctl_call import (
    ClientName,
    Gpu,
    Json,
    Where,
    client_name,
    gpu_names,
    make_request,
    parse_argument,
    run,
    say,
)
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.kinds import Kind, Setting
from nvshare.coordinator.model.settings import CONFIGURED, SETTINGS
from nvshare.coordinator.units import format_share, format_size, parse_part


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _plain(text: str) -> str:
    return text.replace("`", "")


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    settings = typer.Typer(no_args_is_help=True, help="Change a setting at run time; it lasts until `unset`.")
    for name, setting in SETTINGS.items():
        if name == "share_request":
            settings.command("share")(set_share)
        if setting.live:
            how = {"ignore_unknown_options": name == "priority"}  # it may be negative
            settings.command(_dashed(name), help=_plain(setting.help), context_settings=how)(_command(name, setting))
        elif name in CONFIGURED:
            how = {"ignore_unknown_options": True, "allow_extra_args": True}
            settings.command(_dashed(name), hidden=True, context_settings=how)(_refusal(name))
    app.add_typer(settings, name="set")
    app.command()(limit)
    app.command()(unset)


def _command(name: str, setting: Setting) -> Callable[..., None]:
    """The command `set NAME`, with the arguments that the setting has."""
    word = name.rpartition("_")[2].upper()

    def command(context: typer.Context, **given: Any) -> None:
        where, as_json = given.pop("where"), given.pop("as_json")
        value = parse_argument(setting.kind.read, given.pop("value"), word)
        request = make_request(api.Set, setting=name, value=value, **given)
        run(context, where, as_json, request, lambda result: say(_done(setting, value, result), result))

    def parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)

    found = [parameter("context", typer.Context)]
    found += [parameter("client", ClientName)] if setting.of_client else []
    argument = typer.Argument(metavar=word, help=setting.kind.forms, autocompletion=lambda: _words(setting.kind))
    found += [parameter("value", Annotated[str, argument])]
    found += [parameter("gpu", Gpu, None)] if setting.by_gpu else []
    found += [parameter("as_json", Json, False), parameter("where", Where, None)]
    command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in found}
    return command


def _refusal(name: str) -> Callable[[], None]:
    def command() -> None:
        raise typer.BadParameter(
            f"{name} is read when the coordinator starts: give it --{_dashed(name)}, or write {name} into its file"
        )

    return command


def _words(kind: Kind) -> list[str]:
    from nvshare.coordinator.daemon.settings_file import words  # in no command's way

    return words(kind)


def _done(setting: Setting, value: Any, result: dict[str, Any]) -> str:
    words = {"value": setting.kind.show(value), "used": "", "more": "", "limit": "no limit"}
    if "gpus" in result:
        words["gpus"] = gpu_names(result)
    if "client" in result:
        words["client"] = client_name(result)
    if "host_shared_bytes" in result:
        words["used"] = format_size(result["host_shared_bytes"])
        if setting.name == "host_budget" and result["host_shared_bytes"] > value:
            words["more"] = ", so clients get no more until some is returned"
    if "limit_bytes" in result and value:
        words["limit"] = f"a limit of {format_size(value)}"
        if result["allocated_bytes"] > value:
            used = format_size(result["allocated_bytes"])
            words["more"] = f"; it has {used} already and cannot allocate more"
    usual = "{name} is {value} on {gpus}" if setting.by_gpu else "{name} is {value}"
    return (setting.done or usual).format(name=_dashed(setting.name), **words)


def set_share(
    context: typer.Context,
    client: ClientName,
    share_request: Annotated[
        str | None, typer.Option("--request", help="guaranteed share of the GPU's time: 0.3 or 30%; 0: none")
    ] = None,
    share_limit: Annotated[
        str | None, typer.Option("--limit", help="greatest share, also when the client is alone: 0.5 or 50%")
    ] = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set a client's guaranteed and greatest share, under the policies auto and fair_share."""
    request_part = None if share_request is None else parse_argument(parse_part, share_request, "--request")
    limit_part = None if share_limit is None else parse_argument(parse_part, share_limit, "--limit")
    request = make_request(api.SetShare, client=client, request=request_part, limit=limit_part)
    run(context, where, as_json, request, _say_share)


def _say_share(result: dict[str, Any]) -> None:
    request, most = format_share(result["share_request"]), format_share(result["share_limit"])
    say(f"{client_name(result)} has a share request of {request} and a share limit of {most}", result)


def limit(
    context: typer.Context,
    client: ClientName,
    memory: Annotated[str, typer.Option(help="memory that it may allocate: 4GiB; 0: no limit")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Limit a client's memory while it runs."""
    size = parse_argument(SETTINGS["limit"].kind.read, memory, "--memory")
    request = make_request(api.Set, setting="limit", value=size, client=client, gpu=gpu)
    run(context, where, as_json, request, lambda result: say(_done(SETTINGS["limit"], size, result), result))


def unset(
    context: typer.Context,
    setting: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(_dashed(name) for name in CONFIGURED if SETTINGS[name].is_live)}; "
            "priority, weight, class, share, limit, paused CLIENT"
        ),
    ] = None,
    client: Annotated[str | None, typer.Argument(metavar="CLIENT", help="only the settings of this client")] = None,
    gpu: Gpu = None,
    everything: Annotated[bool, typer.Option("--all", help="all live settings")] = False,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Remove live settings: the configured values and the programs' own apply again."""
    if everything == (setting is not None):
        raise typer.BadParameter("name a setting or --all")
    name = None if setting is None else setting.replace("-", "_")
    request = make_request(api.Unset, setting=name, client=client, gpu=gpu)
    run(context, where, as_json, request, _say_removed)


def _say_removed(result: dict[str, Any]) -> None:
    from nvshare.coordinator.cli.views.sentences import live_lines

    for line in live_lines(result["undone"]):
        say(f"removed: {line}", result)
