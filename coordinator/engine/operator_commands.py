"""Changes by the operator while clients run: quantum, policy, sharing, priority, weight, limits, pauses.

A command for a client or GPU that is not there changes nothing and is logged.
Non-goals: parsing of what the operator typed (cli/ctl.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nvshare.coordinator.engine import leases, reconcile
from nvshare.coordinator.engine.policy_guard import PolicyFactory
from nvshare.coordinator.gangs import slots
from nvshare.coordinator.memory import room
from nvshare.coordinator.memory.client_settings import send_settings, send_settings_to_all
from nvshare.coordinator.memory.quantum import automatic_quantum_ns
from nvshare.coordinator.model import events
from nvshare.coordinator.model.client import Client
from nvshare.coordinator.model.commands import Log, Notify
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, WAITING
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.scheduler_policies.api import JobClass, Policy


def _gpus(node: Node, uuid: str | None) -> list[Gpu]:
    if uuid is None:
        return list(node.gpus.values())
    gpu = node.gpus.get(uuid)
    if gpu is None:
        node.out.append(Log(logging.WARNING, f"no GPU {uuid}"))
        return []
    return [gpu]


def _client(node: Node, client: int) -> Client | None:
    record = node.clients.get(client)
    if record is None:
        node.out.append(Log(logging.WARNING, f"no client c{client}"))
    return record


def set_quantum(node: Node, event: events.QuantumSet, now_ns: int) -> Iterable[Gpu]:
    """The end of the present lease moves with the new quantum."""
    gpus = _gpus(node, event.uuid)
    for gpu in gpus:
        gpu.rules.quantum_setting_ns = event.quantum_ns
        quantum_ns = automatic_quantum_ns(gpu, node.settings) if event.quantum_ns is None else event.quantum_ns
        leases.set_quantum(gpu, quantum_ns)
        automatic = event.quantum_ns is None
        node.out.append(Notify("quantum", {"uuid": gpu.uuid, "quantum_ns": quantum_ns, "automatic": automatic}))
    return gpus


def set_policy(node: Node, event: events.PolicySet, now_ns: int, factory: PolicyFactory) -> Iterable[Gpu]:
    """Replaces the policy from the next decision on.  A policy that cannot be made leaves the old one in place."""
    gpus = _gpus(node, event.uuid)
    for gpu in gpus:
        try:
            policy = event.policies.get(gpu.uuid) or factory(event.name, gpu.uuid)
            assert isinstance(policy, Policy), f"{policy!r} has no decide()"
        except Exception as error:
            node.out.append(
                Log(logging.ERROR, f"policy {event.name}: {error}; {gpu.uuid} keeps {gpu.policy_guard.name}")
            )
            continue
        gpu.policy_guard.replace(event.name, policy)
        gpu.schedule.stale = True
        node.out.append(Notify("policy", {"uuid": gpu.uuid, "policy": event.name}))
    return gpus


def set_sharing(node: Node, event: events.SharingSet, now_ns: int) -> Iterable[Gpu]:
    """Changes the sharing at once; concurrent sharing only as far as memory allows it.

    Exclusive sharing during recovery revokes every lease, as the process that is waited for may be at work.
    """
    gpus = _gpus(node, event.uuid)
    for gpu in gpus:
        gpu.rules.sharing = event.sharing
        gpu.rules.view = None
        gpu.schedule.stale = True
        if event.sharing is Sharing.EXCLUSIVE and gpu.recovering:  # the earlier holder may be at work
            for seat in list(gpu.leases.running.values()):
                leases.revoke(node, gpu, seat, "plan", now_ns)
        send_settings_to_all(node, gpu)
        node.out.append(Notify("sharing", {"uuid": gpu.uuid, "sharing": event.sharing.name.lower()}))
    return gpus


def set_priority(node: Node, event: events.PrioritySet, now_ns: int) -> Iterable[Gpu]:
    """May preempt at once."""
    return _set_rank(node, event.client, priority=event.priority)


def set_weight(node: Node, event: events.WeightSet, now_ns: int) -> Iterable[Gpu]:
    """Concerns policies that divide time.  Time that was used before counts at the old weight."""
    return _set_rank(node, event.client, weight=event.weight)


def set_class(node: Node, event: events.ClassSet, now_ns: int) -> Iterable[Gpu]:
    """Concerns policies that know classes."""
    return _set_rank(node, event.client, job_class=event.job_class)


def set_shares(node: Node, event: events.SharesSet, now_ns: int) -> Iterable[Gpu]:
    """Concerns policies that know shares.  A request above the limit is lowered to it."""
    client = _client(node, event.client)
    if client is None:
        return []
    limit = client.rank.share_limit if event.limit is None else event.limit
    request = client.rank.share_request if event.request is None else event.request
    return _set_rank(node, event.client, share_request=min(request, limit), share_limit=limit)


def set_profile(node: Node, event: events.Profiled, now_ns: int) -> Iterable[Gpu]:
    """Applies a client's profile.  The first deadline stands, or a program would never be late."""
    client = node.clients[event.client]
    client.spatial = event.spatial
    return _set_rank(
        node,
        event.client,
        job_class=event.job_class,
        share_request=min(event.share_request, event.share_limit),
        share_limit=event.share_limit,
        deadline_ns=client.rank.deadline_ns or event.deadline_ns,
    )


def _set_rank(node: Node, number: int, **values: Any) -> list[Gpu]:
    """The policy's view of a client has changed, on each of its GPUs."""
    client = _client(node, number)
    if client is None:
        return []
    client.rank = replace(client.rank, **values)
    node.out.append(Notify("rank", {"client": number, **{name: _plain(value) for name, value in values.items()}}))
    for seat in client.seats.values():
        seat.gpu.wait_queue.changed(seat)
        seat.gpu.rules.rank_epoch += 1
        seat.gpu.schedule.stale = True
    return [seat.gpu for seat in client.seats.values()]


def _plain(value: Any) -> int | float | str | None:
    return value.name.lower() if isinstance(value, JobClass) else value


def set_gang(node: Node, event: events.GangSet, now_ns: int) -> list[Gpu]:
    """An annotation changed."""
    client = node.clients.get(event.client)
    if client is None:
        return []
    for seat in client.seats.values():
        slots.remove_member(node, seat)
    client.gang = event.gang
    for seat in client.seats.values():
        slots.add_member(node, seat)
        seat.gpu.wait_queue.changed(seat)
        seat.gpu.schedule.stale = True
    node.out.append(Notify("gang", {"client": event.client, "gang": event.gang}))
    return [seat.gpu for seat in client.seats.values()]


def set_limit(node: Node, event: events.LimitSet, now_ns: int) -> Iterable[Gpu]:
    """A limit below what is in use prevents further allocations."""
    client = _client(node, event.client)
    if client is None:
        return []
    if event.uuid is None:
        client.memory_limit_bytes = event.limit_bytes
    for seat in client.seats.values():
        if event.uuid in (None, seat.gpu.uuid):
            seat.memory.limit_bytes = event.limit_bytes
            room.raise_highest_limit(seat)
            seat.gpu.settings_changed()
            send_settings(node, seat)
    node.out.append(Notify("limit", {"client": event.client, "uuid": event.uuid, "limit_bytes": event.limit_bytes}))
    return []


def set_switch_share(node: Node, event: events.SwitchShareSet, now_ns: int) -> Iterable[Gpu]:
    """Concerns an automatic quantum, which follows at once."""
    assert 0.0 < event.share < 1.0, event.share
    gpus = _gpus(node, event.uuid)
    for gpu in gpus:
        gpu.rules.switch_share = event.share
        if gpu.rules.quantum_setting_ns is None:
            leases.set_quantum(gpu, automatic_quantum_ns(gpu, node.settings))
        node.out.append(
            Notify("switch_share", {"uuid": gpu.uuid, "share": event.share, "quantum_ns": gpu.rules.quantum_ns})
        )
    return gpus


def pause(node: Node, event: events.Paused, now_ns: int) -> Iterable[Gpu]:
    """The client is granted nothing, and its leases are revoked."""
    client = _client(node, event.client)
    if client is None or client.paused:
        return []
    client.paused = True
    node.out.append(Notify("paused", {"client": event.client}))
    for seat in client.seats.values():
        seat.gpu.schedule.stale = True
        if seat in seat.gpu.wait_queue:
            seat.gpu.wait_queue.leave(seat)
        elif seat.phase is NEXT:
            reconcile.cancel_switch(seat.gpu, now_ns)
        elif seat.phase is HOLDING:
            leases.revoke(node, seat.gpu, seat, "paused", now_ns)
    return [seat.gpu for seat in client.seats.values()]


def resume(node: Node, event: events.Resumed, now_ns: int) -> Iterable[Gpu]:
    """The client waits from now on; the pause does not count as waiting."""
    client = _client(node, event.client)
    if client is None or not client.paused:
        return []
    client.paused = False
    node.out.append(Notify("resumed", {"client": event.client}))
    for seat in client.seats.values():
        if seat.phase is WAITING and not seat.room.unschedulable:
            seat.place.waiting_since_ns = now_ns
            seat.place.view = None
            seat.gpu.wait_queue.join(seat)
            seat.gpu.schedule.stale = True
    return [seat.gpu for seat in client.seats.values()]
