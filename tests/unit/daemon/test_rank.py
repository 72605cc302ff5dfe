"""The priority and weight that a program gets by its own environment."""

from __future__ import annotations

import os

import pytest

from nvshare.coordinator.daemon import settings_file
from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kubernetes.slots.slot import Slot, SlotPolicy
from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import JobClass

OTHER = os.geteuid() + 1000


class Connections:
    """One peer in place of a transport, and no journal."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.sent: list[messages.Message | int] = []

    def peer(self, connection: int) -> Peer:
        return self._peer

    def send(self, connection: int, frame: bytes) -> None:
        self.sent.append(messages.decode(frame, messages.TO_CLIENT))

    def greeted(self, connection: int) -> None:
        pass

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        raise AssertionError(frame)

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        pass

    def forget(self, process_id: int) -> None:
        pass


def dispatcher_for(peer: Peer, policy: SlotPolicy | None = None) -> tuple[Dispatcher, Connections]:
    """A dispatcher where 5 and 50 are the bounds, with the peer's slot."""
    connections = Connections(peer)
    rights, book = Rights(os.geteuid(), max_priority=5, max_weight=50), SlotBook()
    dispatcher = Dispatcher(Scheduler(registry.create), connections, connections, rights, max_clients=9, slots=book)
    if peer.slot:
        slot = Slot(slot=peer.slot, allocation="1", allocated_at_s=0, gpus=("G",), device_ids=("G::0",))
        book.put(slot.model_copy(update={"policy": policy}) if policy else slot)
    return dispatcher, connections


def greet(peer: Peer, priority: int, weight: int, policy: SlotPolicy | None = None) -> tuple[int, int, list[str]]:
    """The rank that it gets, and what it is told besides."""
    dispatcher, connections = dispatcher_for(peer, policy)
    dispatcher.frame(1, messages.encode(messages.Hello(1, "job", "python", 1, priority, 1, 0, "", weight)), 1)
    (client,) = dispatcher.scheduler.snapshot(2).clients
    told = [
        message.text for message in connections.sent if isinstance(message, messages.Rejected) and not message.final
    ]
    return client.rank.priority, client.rank.weight, told


def test_a_user_raises_nothing_beyond_the_bounds() -> None:
    """Broken: under `priority` any user of the node goes before all others."""
    priority, weight, (told,) = greet(Peer(7, OTHER), 1000, 10_000)
    assert (priority, weight) == (5, 50)
    assert told == f"user {OTHER} is limited to priority 5 and weight 50 (max_priority, max_weight)"
    assert greet(Peer(7, OTHER), -1000, 1) == (-1000, 1, []), "stepping back is free"


@pytest.mark.parametrize("user", [0, os.geteuid()])
def test_who_may_use_nvshare_ctl_has_no_bound(user: int) -> None:
    """Broken: one's own coordinator, where there is nobody else, ignores --priority."""
    assert greet(Peer(7, user), 1000, 10_000) == (1000, 10_000, [])


@pytest.mark.parametrize(("user", "request_share"), [(OTHER, 0.0), (0, 0.9)])
def test_operators_give_guaranteed_shares(user: int, request_share: float) -> None:
    """Broken: a user's program has nine tenths of the GPU by its own environment, and the others what is left."""
    dispatcher, connections = dispatcher_for(Peer(7, user))
    dispatcher.frame(1, messages.encode(messages.Hello(1, "job", "python", 1, 0, 1, 0, "", 1)), 1)
    dispatcher.frame(1, messages.encode(messages.Profile(1, 900, 1000)), 2)
    (client,) = dispatcher.scheduler.snapshot(3).clients
    assert (client.rank.job_class, client.rank.share_request) == (JobClass.INTERACTIVE, request_share)
    told = [message.text for message in connections.sent if isinstance(message, messages.Rejected)]
    assert ["guaranteed share" in text for text in told] == ([True] if user else [])


def test_a_slot_has_its_annotations() -> None:
    """Broken: bounds for users change what annotations say, or the environment counts."""
    for user in (0, OTHER):
        assert greet(Peer(7, user, "s"), 1000, 10_000) == (0, 1, [])
        assert greet(Peer(7, user, "s"), 0, 1, SlotPolicy(priority=90, weight=200)) == (90, 200, [])


def test_a_slot_has_its_class_and_shares() -> None:
    """Broken: a pod is interactive by its own environment, or an annotation is lost before the hook says its class."""
    policy = SlotPolicy.model_validate({"class": "best-effort", "share_limit": 0.5})
    dispatcher, _ = dispatcher_for(Peer(7, OTHER, "s"), policy)
    dispatcher.frame(1, messages.encode(messages.Hello(1, "job", "python", 1, 0, 1, 0, "", 1)), 1)
    for said in (None, messages.Profile(1, 900, 1000)):
        if said is not None:
            dispatcher.frame(1, messages.encode(said), 2)
        (client,) = dispatcher.scheduler.snapshot(3).clients
        assert client.rank.job_class is JobClass.BEST_EFFORT
        assert (client.rank.share_request, client.rank.share_limit) == (0.0, 0.5)


def test_the_first_deadline_stands() -> None:
    """Broken: a program that sends its deadline again is never late, and has all turns under `edf`."""
    dispatcher, _ = dispatcher_for(Peer(7, OTHER))
    dispatcher.frame(1, messages.encode(messages.Hello(1, "job", "python", 1, 0, 1, 0, "", 1)), 1)
    for deadline_ns in (50, 90):
        dispatcher.frame(1, messages.encode(messages.Profile(0, 0, 1000, deadline_ns)), 2)
    assert dispatcher.facts(1).rank.deadline_ns == 52


def test_the_defaults_divide_by_user_and_give_nobody_priority() -> None:
    """Broken: a node with several users has to be told that they do not trust each other."""
    settings = settings_file.load({}, {})
    assert (settings.max_priority, settings.max_weight) == (0, 100)
    assert settings.users_first
    told = settings_file.load(
        {}, {"NVSHARE_SHARE_BY": "program", "NVSHARE_MAX_PRIORITY": "-3", "NVSHARE_MAX_WEIGHT": "7"}
    )
    assert not told.users_first
    assert (told.max_priority, told.max_weight) == (-3, 7)
