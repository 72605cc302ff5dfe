"""The priority and weight that a program gets by its own environment."""

from __future__ import annotations

import os

import pytest

from nvshare.coordinator.daemon import settings_file
from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.dispatch import MOST_TOLD, Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kubernetes.slots.slot import Slot
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


def dispatcher_for(peer: Peer, policy: dict[str, str] | None = None) -> tuple[Dispatcher, Connections]:
    """A dispatcher where 5 and 50 are the bounds, with the peer's slot."""
    connections = Connections(peer)
    rights, book = Rights(os.geteuid(), max_priority=5, max_weight=50), SlotBook()
    dispatcher = Dispatcher(Scheduler(registry.create), connections, connections, rights, max_clients=9, slots=book)
    if peer.slot:
        slot = Slot(slot=peer.slot, allocation="1", allocated_at_s=0, gpus=("G",), device_ids=("G::0",))
        book.put(slot.model_copy(update={"policy": policy}) if policy else slot)
    return dispatcher, connections


def hello(profile: str) -> bytes:
    return messages.encode(messages.Hello(messages.PROTOCOL_VERSION, "job", "python", 1, 0, profile=profile))


def greet(peer: Peer, priority: int, weight: int, policy: dict[str, str] | None = None) -> tuple[int, int, list[str]]:
    """The rank that it gets, and what it is told besides."""
    dispatcher, connections = dispatcher_for(peer, policy)
    dispatcher.frame(1, hello(f"priority={priority}\nweight={weight}\n"), 1)
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
    dispatcher.frame(1, hello("class=interactive\nshare_request=90%"), 1)
    (client,) = dispatcher.scheduler.snapshot(3).clients
    assert (client.rank.job_class, client.rank.share_request) == (JobClass.INTERACTIVE, request_share)
    told = [message.text for message in connections.sent if isinstance(message, messages.Rejected)]
    assert ["guaranteed share" in text for text in told] == ([True] if user else [])


def test_a_slot_has_its_annotations() -> None:
    """Broken: bounds for users change what annotations say, or the environment counts."""
    for user in (0, OTHER):
        assert greet(Peer(7, user, "s"), 1000, 10_000) == (0, 1, [])
        assert greet(Peer(7, user, "s"), 0, 1, {"priority": "90", "weight": "200"}) == (90, 200, [])


def test_a_slot_has_its_class_and_shares() -> None:
    """Broken: a pod is interactive by its own environment, or an annotation is lost before the hook says its class."""
    policies = {"class": "best-effort", "share_limit": "0.5"}, {"share_limit": "0.5"}
    for policy, job_class in zip(policies, (JobClass.BEST_EFFORT, JobClass.BATCH), strict=True):
        dispatcher, _ = dispatcher_for(Peer(7, OTHER, "s"), policy)
        dispatcher.frame(1, hello("class=interactive\nshare_request=0.9\nshare_limit=1"), 1)
        (client,) = dispatcher.scheduler.snapshot(3).clients
        assert client.rank.job_class is job_class
        assert (client.rank.share_request, client.rank.share_limit) == (0.0, 0.5)


def test_a_deadline_counts_from_the_connection() -> None:
    """Broken: a deadline of an hour is a time of the node's clock in its first hour, and later always past."""
    dispatcher, _ = dispatcher_for(Peer(7, OTHER))
    dispatcher.frame(1, hello("deadline=50ns"), 2)
    assert dispatcher.facts(1).rank.deadline_ns == 52


def test_a_mistake_is_told_and_costs_its_own_word_alone() -> None:
    """Broken: a typing mistake in a variable ends a program, is swallowed, or a flood of them fills its log."""
    dispatcher, connections = dispatcher_for(Peer(7, OTHER))
    said = "class=urgent\nshare_limit=0.5\nnewer=1\nmemory=swap\n" + "".join(f"{i}\n" for i in range(90))
    dispatcher.frame(1, hello(said), 1)
    (client,) = dispatcher.scheduler.snapshot(3).clients
    assert (client.rank.job_class, client.rank.share_limit) == (JobClass.BATCH, 0.5)
    told = [message.text for message in connections.sent if isinstance(message, messages.Rejected)]
    assert told[0] == ("NVSHARE_CLASS: 'urgent' is not allowed: write interactive, batch, best-effort; ignored")
    assert told[1].startswith("NVSHARE_NEWER: this version of nvshare does not know it")
    assert len(told) == MOST_TOLD


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
