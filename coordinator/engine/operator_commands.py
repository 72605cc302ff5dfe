"""Settings that change while clients run: the one place that applies `events.Set`.

A setting of the node that a user of `node.settings` reads at its next use needs nothing here.  The tables at the end
name what else follows a change at once.  A change for a client or GPU that is not there is logged and does nothing.
Non-goals: what the operator typed, and which values are allowed (model/settings.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

from nvshare.coordinator.engine import leases, reconcile
from nvshare.coordinator.engine.gangs import slots
from nvshare.coordinator.engine.memory import room
from nvshare.coordinator.engine.memory.client_settings import send_settings, send_settings_to_all
from nvshare.coordinator.engine.memory.quantum import automatic_quantum_ns
from nvshare.coordinator.engine.parking import migration, parking
from nvshare.coordinator.model import events
from nvshare.coordinator.model.client import Client
from nvshare.coordinator.model.commands import Log
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.model.settings import SETTINGS, Sharing
from nvshare.scheduler_policies.api import JobClass, Policy, Rank


def set_value(node: Node, event: events.Set, now_ns: int) -> None:
    """Applies a value."""
    setting = SETTINGS[event.setting]
    value = setting.kind.typed(event.value)
    if setting.of_client:
        client = node.clients.get(event.client or 0)
        if client is None:
            node.out.append(Log(logging.WARNING, f"no client c{event.client}"))
        elif setting.name in _ACTS:
            _ACTS[setting.name](node, client, value, now_ns)
        else:
            settle(node, client, client.facts.having(**_fields_of(client.facts, event, value)), now_ns)
        return
    gpus = list(node.gpus.values()) if event.gpu is None else [node.gpus[event.gpu]] if event.gpu in node.gpus else []
    if event.gpu is None:
        node.settings = replace(node.settings, **{setting.field: value})
    elif not gpus:
        node.out.append(Log(logging.WARNING, f"no GPU {event.gpu}"))
    follow = _OF_GPU.get(setting.name)
    for gpu in gpus:
        gpu.settings = replace(gpu.settings, **{setting.field: value})
        node.concern(gpu)
        if follow is not None:
            follow(node, gpu, now_ns)
    if follow is None:
        node.notify(setting.name, uuid=event.gpu, **{setting.field: event.value})


def _fields_of(facts: Facts, event: events.Set, value: Any) -> dict[str, Any]:
    """The facts' fields that a setting of a client changes."""
    if event.gpu is not None:
        return {"limits_of_gpus": tuple({**dict(facts.limits_of_gpus), event.gpu: value}.items())}
    return {SETTINGS[event.setting].field: value, **({"limits_of_gpus": ()} if event.setting == "limit" else {})}


# --- of GPUs ----------------------------------------------------------------------------------------------------------


def _quantum(node: Node, gpu: Gpu, now_ns: int) -> None:
    """The end of the present lease moves with the new quantum."""
    automatic = gpu.settings.quantum_ns is None
    leases.set_quantum(gpu, gpu.settings.quantum_ns or automatic_quantum_ns(gpu))
    node.notify("quantum", uuid=gpu.uuid, quantum_ns=gpu.rules.quantum_ns, automatic=automatic)


def _switch_share(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Concerns an automatic quantum, which follows at once."""
    if gpu.settings.quantum_ns is None:
        leases.set_quantum(gpu, automatic_quantum_ns(gpu))
    node.notify("switch_share", uuid=gpu.uuid, share=gpu.settings.switch_share, quantum_ns=gpu.rules.quantum_ns)


def _policy(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Replaces the policy from the next decision on.  A policy that cannot be made leaves the old one in place."""
    name = gpu.settings.policy
    try:
        policy = gpu.policy_guard.make(name)
        assert isinstance(policy, Policy), f"{policy!r} has no decide()"
    except Exception as error:
        gpu.settings = replace(gpu.settings, policy=gpu.policy_guard.name)
        text = f"policy {name}: {error}; {gpu.uuid} keeps {gpu.policy_guard.name}"
        node.out.append(Log(logging.ERROR, text))
        return
    gpu.policy_guard.replace(name, policy)
    gpu.schedule.stale = True
    node.notify("policy", uuid=gpu.uuid, policy=name)


def _sharing(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Changes the sharing at once; concurrent sharing only as far as memory allows it.

    Exclusive sharing during recovery revokes every lease, as the process that is waited for may be at work.
    """
    gpu.rules.view = None
    gpu.schedule.stale = True
    if gpu.settings.sharing is Sharing.EXCLUSIVE and gpu.recovering:  # the earlier holder may be at work
        for seat in list(gpu.leases.running.values()):
            leases.revoke(node, gpu, seat, "plan", now_ns)
    send_settings_to_all(node, gpu)
    node.notify("sharing", uuid=gpu.uuid, sharing=gpu.settings.sharing.name.lower())


# --- of clients -------------------------------------------------------------------------------------------------------


def settle(node: Node, client: Client, facts: Facts, now_ns: int) -> None:
    """These facts hold for the client.  A share request above the limit counts as the limit."""
    rank = facts.rank
    gang = facts.gang or (f"user:{client.identity.user_id}/{client.identity}" if client.linked else "")
    had, facts = client.facts, facts.having(share_request=min(rank.share_request, rank.share_limit), gang=gang)
    if facts.gang != had.gang:
        _gang(node, client, facts.gang)
    client.facts = facts
    if facts.rank != had.rank:
        names = [each.name for each in fields(Rank) if getattr(facts.rank, each.name) != getattr(had.rank, each.name)]
        changed = {name: _plain(getattr(facts.rank, name)) for name in names}
        node.notify("rank", client=client.client_id, **changed)
    _limit(node, client)
    if facts.paused is not had.paused:
        _pause(node, client, now_ns)
    if facts.park_after_ns:
        node.own_park_times.add(client.client_id)
    else:
        node.own_park_times.discard(client.client_id)
    if replace(facts, limit_bytes=had.limit_bytes, limits_of_gpus=had.limits_of_gpus) == had:
        return
    for seat in client.seats.values():
        seat.gpu.wait_queue.changed(seat)
        seat.gpu.rules.rank_epoch += 1
        seat.gpu.schedule.stale = True
        node.concern(seat.gpu)


def _plain(value: Any) -> int | float | str | None:
    return value.name.lower() if isinstance(value, JobClass) else value


def _gang(node: Node, client: Client, gang: str) -> None:
    for seat in client.seats.values():
        slots.remove_member(node, seat)
    client.facts = client.facts.having(gang=gang)
    for seat in client.seats.values():
        slots.add_member(node, seat)
    node.notify("gang", client=client.client_id, gang=gang)


def _limit(node: Node, client: Client) -> None:
    """A limit below what is in use prevents further allocations."""
    for seat in client.seats.values():
        limit_bytes = client.facts.limit_on(seat.gpu.uuid)
        if limit_bytes != seat.memory.limit_bytes:
            seat.memory.limit_bytes = limit_bytes
            room.raise_highest_limit(seat)
            seat.gpu.settings_changed()
            send_settings(node, seat)
            node.notify("limit", client=client.client_id, uuid=seat.gpu.uuid, limit_bytes=limit_bytes)


def _pause(node: Node, client: Client, now_ns: int) -> None:
    """A paused client is granted nothing, and its leases are revoked.  The pause does not count as waiting."""
    node.notify("paused" if client.facts.paused else "resumed", client=client.client_id)
    for seat in client.seats.values():
        if not client.facts.paused:
            reconcile.readmit(seat, now_ns)
        else:
            reconcile.withdraw(node, seat, "paused", now_ns)


_OF_GPU: Final[dict[str, Callable[[Node, Gpu, int], None]]] = {
    "quantum": _quantum,
    "switch_share": _switch_share,
    "policy": _policy,
    "sharing": _sharing,
}
_ACTS: Final[dict[str, Callable[[Node, Client, Any, int], None]]] = {
    "parked": parking.set_parked,
    "moved_to": migration.set_target,
}
"""Orders of an operator to a client; all other settings of clients are facts."""
