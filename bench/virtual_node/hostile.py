"""A hostile process: it sends random bytes, broken encodings, and any message in any order, with extreme or heard
numbers.

Most of its connections begin with a valid `Hello`, which the dispatcher requires.  A careful one then names existing
GPUs, leases and targets, and lies about everything else, so that its connection lasts.  Frames arrive in bursts of
bounded length.  The messages and their bounds come from messages.py, so new messages need no change here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgpack

from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.model.profile import MAX_WEIGHT
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.codec import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from nvshare.bench.virtual_node.world import World

BURST: Final = 12
_TYPES: Final = tuple(messages.TO_COORDINATOR.values())
_CAREFUL: Final = tuple(cls for cls in _TYPES if cls not in (messages.Hello, messages.AttachGpu, messages.Goodbye))
_HEARD: Final = frozenset({"lease_id", "number", "sequence", "bytes", "quantum_ns", "client_id"})
_POWERS: Final = (8, 16, 31, 32, 53, 61, 62, 63)


class HostileClient:
    """One process with one connection at a time."""

    def __init__(self, world: World, pid: int, name: str) -> None:
        self.world = world
        self.pid = self.number = pid
        self.name = name
        self.alive = True
        self.connection: int | None = None
        self.peer = Peer(0, 0)
        self._heard: list[int] = [0]
        self._has: dict[int, dict[str, int]] = {}
        """The last lease and target of each GPU."""
        self._care = 0.0
        self._patience_ns = world.chance.choice((5, 20, 100)) * MILLISECOND_NS
        world.after(0, self._act)

    def hear(self, message: messages.Message) -> None:
        """Remembers the coordinator's numbers for later messages."""
        has = self._has.setdefault(getattr(message, "gpu", 0), {})
        for name in message.NAMES:
            if name in _HEARD:
                self._heard.append(getattr(message, name))
            if name in ("lease_id", "number"):
                has["target" if name == "number" else name] = getattr(message, name)
        del self._heard[:-32]

    def lost(self) -> None:
        """Handles the loss of the connection; the next burst reconnects."""
        self.connection = None

    def kill(self) -> None:
        """SIGKILL; the program starts again."""
        number, self.connection = self.connection, None
        if number is not None:
            self.world.network.break_off(number)

    def end(self) -> None:
        """Ends the program for good."""
        self.alive = False
        self.kill()

    def _act(self) -> None:
        world, chance = self.world, self.world.chance
        if not self.alive:
            return
        frames = [self._frame() for _ in range(chance.randint(1, BURST))]
        if self.connection is None and world.shell is not None:
            slots = [slot.slot for slot in world.slots.present()]
            process_id = chance.choice((0, self.pid, self.pid, self.pid))
            self.peer = Peer(process_id, chance.randrange(world.plan.users + 1), chance.choice(["", *slots]))
            self.connection = world.network.open(self, world.shell)
            self._has, self._care = {}, chance.choice((0.0, 0.9, 1.0))
            if chance.random() < 0.9:
                frames[:0] = [self._hello(), *(self._attach(gpu) for gpu in range(chance.randint(0, 2)))]
        if self.connection is not None:
            world.network.send_up(self.connection, *frames)
            if chance.random() < 0.02:
                self.kill()
        world.after(int(chance.expovariate(1 / self._patience_ns)), self._act)

    # --- frames -----------------------------------------------------------------------------------------------------

    def _hello(self) -> bytes:
        chance, plan = self.world.chance, self.world.plan
        mode = chance.choice(list(messages.MemoryMode))
        gang = f"g{chance.randrange(plan.gangs)}" if plan.gangs else ""
        priority, weight = chance.randint(-3, 3), chance.choice((1, MAX_WEIGHT))
        said = f"priority={priority}\nweight={weight}\ngang={gang}\nshare_limit={self._number(9)}\n{self.name}"
        return messages.encode(messages.Hello(messages.PROTOCOL_VERSION, self.name, "x", mode, 0, profile=said))

    def _attach(self, gpu: int) -> bytes:
        chance = self.world.chance
        uuid = chance.choice(self.world.uuids)
        lease, wanted = chance.choice((0, 0, self._number((1 << 64) - 1))), chance.random() < 0.5
        some = chance.randint(0, self.world.plan.capacity_bytes)
        return messages.encode(messages.AttachGpu(gpu, uuid, lease, wanted, some, 0, 0))

    def _frame(self) -> bytes:
        chance = self.world.chance
        if self._has and chance.random() < self._care:
            return self._lie(chance.choice(_CAREFUL), chance.choice(list(self._has)))
        kind = chance.random()
        if kind < 0.02:
            return chance.randbytes(chance.choice((0, 1, 8, 100, MAX_FRAME_BYTES + 1)))
        items = self._items(chance.choice(_TYPES))
        if kind < 0.05:
            chance.shuffle(items)
        elif kind < 0.08:
            items[chance.randrange(len(items))] = chance.choice((None, -1, 1.5, "text", b"\xff\0", [[]], {}, True))
        elif kind < 0.10:
            del items[chance.randrange(len(items)) :]
        elif kind < 0.12:
            items += [0, b"more"]
        frame: bytes = msgpack.packb(items)
        return frame[: chance.randrange(len(frame))] if kind > 0.98 else frame

    def _lie(self, cls: type[messages.Message], gpu: int) -> bytes:
        """A message with existing numbers and otherwise random fields."""
        items, true = self._items(cls), {"gpu": gpu, **self._has[gpu]}
        for index, name in enumerate(cls.NAMES, start=1):
            items[index] = true.get(name, items[index])
        frame: bytes = msgpack.packb(items)
        return frame

    def _items(self, cls: type[messages.Message]) -> list[object]:
        return [cls.TYPE, *(self._value(name, bound) for name, bound in zip(cls.NAMES, cls.LIMITS, strict=True))]

    def _value(self, name: str, bound: tuple[int, int, int]) -> object:
        chance, (kind, low, high) = self.world.chance, bound
        if kind == 1:
            return chance.random() < 0.5
        if kind == 2:
            return chance.choice(self.world.uuids) if name == "uuid" else chance.choice(("", "x", "\x1b[2J", "é" * 31))
        if name == "gpu" and chance.random() < 0.9:
            return chance.randrange(2)
        if low < 0:
            return chance.choice((low, -1, 0, high))
        return self._number(high)

    def _number(self, high: int) -> int:
        chance = self.world.chance
        kind = chance.random()
        if kind < 0.5:
            return min(high, chance.choice(self._heard))
        if kind < 0.8:
            return chance.randint(0, min(high, 2 * self.world.plan.capacity_bytes))
        if kind < 0.9:
            return chance.choice((high, high - 1))
        return min(high, (1 << chance.choice(_POWERS)) + chance.randint(-1, 1))
