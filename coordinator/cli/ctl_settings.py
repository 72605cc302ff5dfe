"""The commands of `nvshare-ctl` that change settings: `set`, `limit` and `unset`."""

from __future__ import annotations

from typing import Annotated, Any, Final

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
from nvshare.coordinator.units import (
    format_duration,
    format_share,
    format_size,
    parse_part,
    parse_quantum,
    parse_share,
    parse_size,
)

_SHARING_MODES: Final = ("auto", "exclusive", "concurrent")
_CLASSES: Final = ("interactive", "batch", "best-effort")

settings = typer.Typer(no_args_is_help=True, help="Change a setting at run time; it lasts until `unset`.")


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.add_typer(settings, name="set")
    app.command()(limit)
    app.command()(unset)


# --- GPUs and the node ----------------------------------------------------------------------------------------------


@settings.command("quantum")
def set_quantum(
    context: typer.Context,
    quantum: Annotated[str, typer.Argument(help="250ms, 2s, auto")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set the length of a turn."""
    value = parse_argument(parse_quantum, quantum, "QUANTUM")
    shown = "auto" if value is None else format_duration(value)
    request = api.SetQuantum(quantum_ns=value, gpu=gpu)
    run(context, where, as_json, request, lambda result: say(f"quantum is {shown} on {gpu_names(result)}", result))


def _policies() -> list[str]:
    from nvshare.scheduler_policies.registry import offers

    return list(offers())


@settings.command("policy")
def set_policy(
    context: typer.Context,
    policy: Annotated[
        str,
        typer.Argument(
            help="auto, round_robin, priority, fair_share, opportunistic, least_attained, edf, or a plug-in",
            autocompletion=_policies,
        ),
    ],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set the scheduling policy."""
    request = make_request(api.SetPolicy, policy=policy, gpu=gpu)
    run(context, where, as_json, request, lambda result: say(f"policy is {policy} on {gpu_names(result)}", result))


@settings.command("sharing")
def set_sharing(
    context: typer.Context,
    sharing: Annotated[
        str, typer.Argument(help="auto, exclusive or concurrent", autocompletion=lambda: _SHARING_MODES)
    ],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Let the policy decide who runs together, or let clients run in turns, or all at once."""
    request = make_request(api.SetSharing, sharing=sharing, gpu=gpu)
    run(context, where, as_json, request, lambda result: say(f"sharing is {sharing} on {gpu_names(result)}", result))


@settings.command("switch-share")
def set_switch_share(
    context: typer.Context,
    share: Annotated[str, typer.Argument(help="5%, 2%")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set the largest share of time for switching, under an automatic quantum."""
    value = parse_argument(parse_share, share, "SHARE")
    request = make_request(api.SetSwitchShare, share=value, gpu=gpu)
    text = f"switching may cost {format_share(value)}"
    run(context, where, as_json, request, lambda result: say(f"{text} on {gpu_names(result)}", result))


@settings.command("host-budget")
def set_host_budget(
    context: typer.Context,
    budget: Annotated[str, typer.Argument(help="64GiB")],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set the pinned host memory of all clients together."""
    request = make_request(api.SetHostBudget, budget_bytes=parse_argument(parse_size, budget, "BUDGET"))
    run(context, where, as_json, request, _say_budget)


def _say_budget(result: dict[str, Any]) -> None:
    budget, shared = result["host_budget_bytes"], result["host_shared_bytes"]
    more = ", so clients get no more until some is returned" if shared > budget else ""
    say(f"host budget is {format_size(budget)}; {format_size(shared)} of it are in use{more}", result)


# --- clients --------------------------------------------------------------------------------------------------------


@settings.command("priority", context_settings={"ignore_unknown_options": True})
def set_priority(
    context: typer.Context,
    client: ClientName,
    priority: Annotated[int, typer.Argument(help="higher runs first, under the policy priority")],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set a client's priority."""
    request = make_request(api.SetPriority, client=client, priority=priority)
    run(context, where, as_json, request, lambda result: say(f"{client_name(result)} has priority {priority}", result))


@settings.command("weight")
def set_weight(
    context: typer.Context,
    client: ClientName,
    weight: Annotated[int, typer.Argument(help="1 to 10000: share of time under the policy fair_share")],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set a client's weight."""
    request = make_request(api.SetWeight, client=client, weight=weight)
    run(context, where, as_json, request, lambda result: say(f"{client_name(result)} has weight {weight}", result))


@settings.command("class")
def set_class(
    context: typer.Context,
    client: ClientName,
    job_class: Annotated[
        str,
        typer.Argument(metavar="CLASS", help="interactive, batch or best-effort", autocompletion=lambda: _CLASSES),
    ],
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set what a client is for, under the policies auto and opportunistic."""
    request = make_request(api.SetClass, client=client, job_class=job_class.replace("-", "_"))
    run(context, where, as_json, request, lambda result: say(f"{client_name(result)} is {job_class}", result))


@settings.command("share")
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


@settings.command("limit")
def set_limit(
    context: typer.Context,
    client: ClientName,
    limit: Annotated[str, typer.Argument(help="4GiB, 512MiB; 0 removes the limit")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Set the GPU memory that a client may allocate."""
    value = parse_argument(parse_size, limit, "LIMIT")
    request = make_request(api.SetLimit, client=client, limit_bytes=value, gpu=gpu)
    run(context, where, as_json, request, _say_limit)


def limit(
    context: typer.Context,
    client: ClientName,
    memory: Annotated[str, typer.Option(help="memory that it may allocate: 4GiB; 0: no limit")],
    gpu: Gpu = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Limit a client's memory while it runs."""
    size = parse_argument(parse_size, memory, "--memory")
    request = make_request(api.SetLimit, client=client, limit_bytes=size, gpu=gpu)
    run(context, where, as_json, request, _say_limit)


def _say_limit(result: dict[str, Any]) -> None:
    size, used = result["limit_bytes"], result["allocated_bytes"]
    shown = f"a limit of {format_size(size)}" if size else "no limit"
    more = f"; it has {format_size(used)} already and cannot allocate more" if size and used > size else ""
    say(f"{client_name(result)} has {shown} of GPU memory{more}", result)


# --- undo -----------------------------------------------------------------------------------------------------------


def unset(
    context: typer.Context,
    setting: Annotated[
        str | None,
        typer.Argument(
            help="quantum, policy, sharing, switch-share, host-budget; "
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
