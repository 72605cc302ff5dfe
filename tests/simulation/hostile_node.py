"""A node with two GPUs whose peers say valid messages in any order: hostile ones of several users, and honest ones.

Where virtual_node/hostile.py sends anything, these peers keep their connections: each message could be a hook's, with
numbers that the peer has heard or that are near.  They attach as parked, claim leases, answer what nobody asked,
release what others have, and report any figures.  The driver says of their processes what it likes, also that they are
on another GPU.  The dispatcher, engine, codec and journal are the real ones; between them are restarts and an operator.

All randomness comes from one seed: `Node(seed, path).live()` runs a sequence again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, OverdueAction, Settings, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MOST_BYTES, MemoryMode, ReleaseReason
from nvshare.coordinator.system.journal import Journal
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import create

UUIDS = ("GPU-0", "GPU-1")
CAPACITY, TOTAL = 1000, 1200
FIRST_PID = 12_000_000
"""Above every process id of Linux."""
STEPS = 60
SERVED_NS = 120 * SECOND_NS
"""Within this time after the last hostile message every honest peer that waits has been granted."""


def settings_of(chance: random.Random) -> Settings:
    """Settings of a node, with all checks on."""
    return Settings(
        check_invariants=True,
        policy=chance.choice(["auto", "auto", "round_robin", "fair_share", "priority"]),
        sharing=chance.choice(list(Sharing)),
        quantum_ns=chance.choice([None, 20 * MILLISECOND_NS]),
        drain_deadline_ns=chance.choice([50 * MILLISECOND_NS, SECOND_NS]),
        recovery_ns=SECOND_NS,
        overdue_action=chance.choice([OverdueAction.NOTHING, OverdueAction.DEMOTE]),
        host_budget_bytes=chance.choice([None, 4 * CAPACITY]),
        park_after_ns=chance.choice([0, 0, SECOND_NS]),
        rebalance=chance.random() < 0.5,
    )


WORDS = ("gang=g", "gang=g", "class=interactive", "class=best-effort", "share_request=0.4", "share_limit=0.3",
         "park_after=1s",
         "park_after=0", "weight=0", "priority=9", "nothing=1", "=", "share_limit=x")  # fmt: skip
"""Of profiles, some of them wrong."""


class Program:
    """A process and its connection; `heard` are the numbers of all peers' messages."""

    def __init__(self, node: Node, user: int) -> None:
        self.node, self.chance = node, node.chance
        self.peer = Peer(FIRST_PID + (len(node.programs) if isinstance(self, Honest) else user), user)
        self.connection: int | None = None
        self.gpus: dict[int, str] = {}
        self.leases: dict[int, int] = {}

    def say(self, *said: messages.Message) -> None:
        """Sends messages, until one of them costs the connection."""
        for message in said:
            if self.connection is not None:
                self.node.dispatcher.frame(self.connection, messages.encode(message), self.node.now_ns)

    def connect(self, mode: MemoryMode, profile: str = "") -> None:
        """A new connection with its hello."""
        self.connection, self.gpus, self.leases = self.node.open(self), {}, {}
        self.say(messages.Hello(messages.PROTOCOL_VERSION, "p", "p", mode, 0, profile=profile))

    def lost(self) -> None:
        """The connection has ended."""
        self.connection = None

    def hear(self, message: messages.Message) -> None:
        """What the coordinator says."""
        raise NotImplementedError

    def act(self) -> None:
        """Its turn to say something."""
        raise NotImplementedError


class Honest(Program):
    """A hook without memory on the card: it wants its turn, gives it back when told, and may be parked."""

    def __init__(self, node: Node, user: int) -> None:
        super().__init__(node, user)
        self.home = len(node.programs) % len(UUIDS)
        self.wanted = self.parked = False
        self.lease = self.served = 0

    def hear(self, message: messages.Message) -> None:
        if isinstance(message, messages.Grant):
            self.lease, self.wanted = message.lease_id, False
            self.served += 1
        elif isinstance(message, messages.Revoke) and message.lease_id == self.lease:
            self._release()
        elif isinstance(message, messages.Park):
            self.parked = message.on
            self.home = UUIDS.index(message.uuid) if message.uuid else self.home
            if message.on:
                self.say(messages.ParkAnswer(True))
        elif isinstance(message, messages.Rejected):
            raise AssertionError(f"an honest peer is refused: {message}")

    def act(self) -> None:
        if self.connection is None:
            self.connect(MemoryMode.SWAP)
            self.say(messages.AttachGpu(0, UUIDS[self.home], self.lease, self.wanted, 0, 0, 0, self.parked))
        elif self.lease and self.chance.random() < 0.5:
            self._release()
        elif not self.lease and not self.wanted:
            self.wanted = True
            self.say(messages.Request(0))

    def _release(self) -> None:
        lease, self.lease, self.wanted = self.lease, 0, self.chance.random() < 0.5
        self.say(messages.Release(0, lease, ReleaseReason.REVOKED, True, self.wanted, 0, 0, 1))


class Hostile(Program):
    """Any message of the protocol, with the right numbers mostly.  Those of one user are connections of one process."""

    def hear(self, message: messages.Message) -> None:
        for name in ("lease_id", "number", "answers"):
            if hasattr(message, name):
                self.node.heard[name] = [*self.node.heard[name][-7:], getattr(message, name)]
        if isinstance(message, messages.Grant):
            self.leases[message.gpu] = message.lease_id
        if isinstance(message, messages.Park) and self.chance.random() < 0.7:
            self.say(messages.ParkAnswer(True))
        if isinstance(message, messages.Revoke) and self.chance.random() < 0.4:
            self.say(self._release(message.gpu, message.lease_id))
        if isinstance(message, messages.Target) and self.chance.random() < 0.4:
            size, error = message.bytes, self.chance.choice([0, 0, 2])
            self.say(messages.State(message.gpu, message.number, size, size, 0, size, error=error))

    def act(self) -> None:
        if self.connection is None:
            self.connect(
                self.chance.choice(list(MemoryMode)),
                "\n".join(self.chance.sample(WORDS, self.chance.choice([0, 0, 1, 3]))),
            )
            for ordinal in range(self.chance.choice([0, 1, 2, 2, 2])):
                self.say(self._attach(ordinal))
        elif self.chance.random() < 0.03:
            self.node.hang_up(self)
        else:
            self.say(self.chance.choice(_SAID)(self))

    def _number(self, name: str) -> int:
        heard = self.node.heard[name]
        near = [0, 1, *heard, max(heard, default=0) + 1, max(heard, default=0) + 9]
        return self.chance.choice([*near, *near, self.chance.choice([1 << 10, 1 << 40, (1 << 63) - 1])])

    def _ordinal(self) -> int:
        return self.chance.choice([*self.gpus, *self.gpus, 0]) if self.chance.random() < 0.98 else 7

    def _lease(self, ordinal: int) -> int:
        return self.leases.get(ordinal, 0) if self.chance.random() < 0.8 else self._number("lease_id")

    def _bytes(self) -> int:
        return self.chance.choice([0, 0, 1, 10, 300, CAPACITY, TOTAL, 3 * TOTAL, MOST_BYTES])

    def _count(self, name: str) -> int:
        return self._number(name) % (1 << 32)

    def _attach(self, ordinal: int) -> messages.Message:
        chance = self.chance
        again, free = ordinal in self.gpus, [uuid for uuid in UUIDS if uuid not in self.gpus.values()]
        likely = [self.gpus[ordinal]] if again else free or UUIDS
        uuid = chance.choice(likely if chance.random() < 0.9 else [*UUIDS, "GPU-9"])
        lease = 0 if again and chance.random() < 0.9 else chance.choice([0, self._number("lease_id")])
        self.gpus.setdefault(ordinal, uuid)
        self.leases.setdefault(ordinal, lease)
        wanted, parked = chance.random() < 0.5, chance.random() < 0.5
        figures = (self._bytes(), self._bytes(), self._bytes()) if chance.random() < 0.3 else (0, 0, 0)
        return messages.AttachGpu(ordinal, uuid, lease, wanted, *figures, parked)

    def _release(self, ordinal: int, lease: int) -> messages.Message:
        chance = self.chance
        drained, wanted, any_time = chance.random() < 0.7, chance.random() < 0.5, self._bytes()
        return messages.Release(ordinal, lease, chance.choice(list(ReleaseReason)), drained, wanted, any_time, 0, 1)

    def _state(self) -> messages.Message:
        size, chance = self._bytes, self.chance
        gpu = messages.HOST if chance.random() < 0.1 else self._ordinal()
        state = messages.State(gpu, self._count("number"), size(), size(), size(), size())
        return replace(
            state,
            released_bytes=size(),
            prepared_bytes=size(),
            linked=chance.random() < 0.1,
            moved_out_bytes=size(),
            moved_in_bytes=size(),
            at_rest=chance.random() < 0.5,
            error=chance.choice([0, 0, 2]),
            asks=self._count("answers"),
            total_bytes=size(),
            lacking_bytes=size(),
            asks_pins=self._count("answers"),
            pins_bytes=size(),
        )

    def _progress(self) -> messages.Message:
        ordinal, now_ns = self._ordinal(), self.node.now_ns
        at_ns = self.chance.choice([0, now_ns, now_ns, 2 * now_ns])
        return messages.Progress(ordinal, self._lease(ordinal), at_ns, self._bytes(), self._bytes(), self._bytes(), 0)

    def _end(self) -> messages.Message:
        ordinal = self._ordinal()
        return self._release(ordinal, self._lease(ordinal))


_SAID: list[Callable[[Hostile], messages.Message]] = [
    *3 * [lambda peer: peer._attach(peer.chance.randint(0, 2))],
    *3 * [lambda peer: messages.Request(peer._ordinal())],
    *3 * [Hostile._end],
    *4 * [Hostile._state],
    Hostile._progress,
    *2 * [lambda peer: messages.ParkAnswer(peer.chance.random() < 0.8, "no")],
    lambda peer: messages.ExplainWait(peer._ordinal()),
]


class _Strict(Dispatcher):
    """A mistake of ours ends the sequence."""

    def failed(self, connection: int, error: Exception, now_ns: int) -> None:
        raise error


class Node:
    """The daemon without its sockets, processes and driver.  It is the dispatcher's outbox."""

    def __init__(self, seed: int, journal: Path) -> None:
        self.chance = random.Random(seed)
        self.now_ns = SECOND_NS
        self.settings = settings_of(self.chance)
        self.heard: dict[str, list[int]] = {"lease_id": [], "number": [], "answers": []}
        self.programs: list[Program] = []
        self._path = journal
        self._connections: dict[int, Program] = {}
        self._last = 0
        self._driver: list[commands.DriverCall] = []
        self._checks: list[str] = []
        self._looked_ns = 0
        self._inbox: list[tuple[Program, messages.Message]] = []
        self._start()
        for user in (1, 2, 1, 2, 3):
            self.programs.append(Hostile(self, user) if user < 3 else Honest(self, user))
        self.programs.append(Honest(self, 1))

    # --- the coordinator --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """A coordinator from what its journal says."""
        self.journal = Journal(self._path, UUIDS, lambda process_id: process_id, self.now_ns // 1000)
        self.scheduler = Scheduler(create, self.settings)
        self.dispatcher = _Strict(
            self.scheduler,
            self,
            self.journal,
            Rights(own_user=0),
            max_clients=self.settings.max_clients,
            watch_end=lambda _: self.chance.random() < 0.5,
            check_memory=self._checks.append,
            park=self._driver.append,
        )
        for uuid in UUIDS:
            next_id, holder = self.journal.next_lease_id(uuid), self.journal.holder(uuid)
            self.give(events.GpuAdded(uuid, "Model", TOTAL, CAPACITY, next_id, holder))

    def _restart(self) -> None:
        """The driver goes on with what it was asked for, and nobody hears of it."""
        self.journal.close()
        self._driver.clear()
        self._checks.clear()
        for program in self._connections.values():
            program.lost()
        self._connections.clear()
        self._start()

    def give(self, event: events.Event) -> None:
        """An event that no client has caused."""
        self.dispatcher.event(event, self.now_ns)

    # --- outbox -----------------------------------------------------------------------------------------------------

    def send(self, connection: int, frame: bytes) -> None:
        message = messages.decode(frame, messages.TO_CLIENT)
        assert isinstance(message, messages.Message)
        program = self._connections.get(connection)
        if program is not None:
            self._inbox.append((program, message))

    def greeted(self, connection: int) -> None:
        pass

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        program = self._connections.pop(connection, None)
        if program is not None:
            assert isinstance(program, Hostile), f"an honest peer is cut: {text}"
            program.lost()

    def peer(self, connection: int) -> Peer | None:
        program = self._connections.get(connection)
        return None if program is None else program.peer

    def open(self, program: Program) -> int:
        """A new connection."""
        self._last += 1
        self._connections[self._last] = program
        return self._last

    def hang_up(self, program: Program) -> None:
        """The program's end of its connection is closed."""
        number, program.connection = program.connection, None
        if number is not None:
            del self._connections[number]
            self.dispatcher.gone(number, self.now_ns)

    # --- what happens -----------------------------------------------------------------------------------------------

    def live(self) -> None:
        """A sequence, then a calm in which hostile peers keep what they have and say nothing."""
        try:
            for _ in range(STEPS):
                self._step()
            self._calm()
        except Exception as error:
            error.add_note("\n".join(self.scheduler.event_log.describe(40)))
            raise
        finally:
            self.journal.close()

    def _step(self) -> None:
        chance = self.chance
        self.chance.choice(self.programs).act()
        what = chance.random()
        if what < 0.06:
            self.give(self._operator())
        elif what < 0.07:
            self._restart()
        elif what < 0.11:
            self.give(events.ProcessEnded(chance.choice(self.programs).peer.process_id))
        if chance.random() < 0.5:
            self._answer()
        self._pass(chance.choice([0, 0, MILLISECOND_NS, 30 * MILLISECOND_NS, SECOND_NS]))

    def _operator(self) -> events.Event:
        chance = self.chance
        client, uuid = chance.choice([*self._connections, 99]), chance.choice([None, *UUIDS])
        park = [events.Set("parked", on, client=client) for on in (True, True, False)]
        move = [events.Set("moved_to", uuid, client=client) for uuid in (*UUIDS, "GPU-9")]
        given = [
            events.Set("paused", chance.random() < 0.3, client=client),
            events.Set("gang", chance.choice(["", "g"]), client=client),
            events.Set("limit", chance.choice([0, 100, CAPACITY]), client=client),
            events.Set("class", chance.choice(list(JobClass)).name.lower(), client=client),
            events.Set("sharing", chance.choice(list(Sharing)).name.lower(), uuid),
            events.Set("policy", chance.choice(["auto", "round_robin"]), uuid),
            events.Set("rebalance", chance.random() < 0.5),
            events.Set("park_after", chance.choice([0, SECOND_NS])),
        ]
        return chance.choice([*park, *park, *move, *move, *given])

    def _answer(self, *, truly: bool = False) -> None:
        """The driver and its figures, of which nothing is certain unless `truly`."""
        chance, (calls, self._driver[:]) = self.chance, (list(self._driver), [])
        for call in calls:
            error = "" if truly or chance.random() < 0.7 else "no"
            if isinstance(call, commands.Checkpoint):
                self.give(events.Saved(call.client, error, *(chance.random() < 0.2 for _ in "lu" if error)))
            elif isinstance(call, commands.Restore):
                gpu = call.target if truly or chance.random() < 0.3 else chance.choice(UUIDS)
                self.give(events.Restored(call.client, error, gpu, bool(error) and chance.random() < 0.1))
        checks, self._checks[:] = list(self._checks), []
        for uuid in checks:
            known = {} if truly else {str(each.peer.process_id): chance.choice([0, 300]) for each in self.programs}
            self.give(events.MemoryChecked(uuid, known, 0 if truly else chance.choice([0, 100, TOTAL])))

    def _deliver(self) -> None:
        while self._inbox:
            program, message = self._inbox.pop(0)
            program.hear(message)

    def _pass(self, elapsed_ns: int) -> None:
        """Lets time pass; the timer fires and the node is looked at when that is due."""
        self._deliver()
        end_ns, fired = self.now_ns + elapsed_ns, 0
        while (due_ns := self.dispatcher.deadline_ns) is not None and due_ns <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.give(events.TimerFired())
            self._deliver()
            fired += 1
            assert fired < 10_000, "the timer fires again and again"
        self.now_ns = end_ns
        if self.scheduler.wants_looks and self.now_ns >= self._looked_ns + SECOND_NS:
            self._looked_ns = self.now_ns
            self.give(events.Look())
        self.dispatcher.publish_notes()
        self._deliver()

    def _calm(self) -> None:
        honest = [program for program in self.programs if isinstance(program, Honest)]
        for program in honest:
            if program.connection is not None:
                self.give(events.Set("paused", False, client=program.connection))
                self.give(events.Set("gang", "", client=program.connection))
            else:
                program.act()
        end_ns, served = self.now_ns + SERVED_NS, [program.served for program in honest]
        waits = [program for program in honest if program.wanted]
        while waits and self.now_ns < end_ns:
            self._answer(truly=True)
            self._pass(100 * MILLISECOND_NS)
            waits = [each for each, before in zip(honest, served, strict=True) if each.wanted and each.served == before]
        if not waits:
            return
        waiting = [self._described(program) for program in waits]
        raise AssertionError(f"honest peers are not served: {waiting}")

    def _described(self, program: Program) -> str:
        found = self.scheduler.client_snapshot(program.connection or 0, self.now_ns)
        assert found is not None
        plans = [f"{gpu.uuid}: {gpu.schedule.why}" for gpu in self.scheduler._node.gpus.values()]
        return f"{found.parking} ({found.parking_why}), {[seat.phase for seat in found.seats]}; {plans}"
