"""Reads the shared state of simulated GPUs: the cards, and the trace of ended work.

The layout is version 6 of include/simulated_gpu.h; other versions are an error.  Reading needs no lock: a record counts
only if its sequence number is the expected one before and after.
"""

import mmap
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvshare.simulated_gpu.environment import SimulatedCards, parse_cards

_MAGIC = 0x5550476D6953764E
_VERSION = 6
_HEADER = struct.Struct("<QIIQQQ")
_GPU = struct.Struct("<16sQIIQ8x")
_RECORD = struct.Struct("<QQQQQQIHH")
_KINDS = {1: "kernel", 2: "copy", 3: "memset", 4: "prefetch", 5: "graph"}


class StateFileError(RuntimeError):
    """The file is not a state file of this version."""


@dataclass(frozen=True, slots=True)
class Card:
    """One simulated GPU, or one MIG instance of one."""

    index: int
    uuid: str
    capacity_bytes: int
    card: int
    """The number of the physical card."""
    context_switches: int = 0
    """Ends of time slices before the work of their program."""


@dataclass(frozen=True, slots=True)
class Busy:
    """One operation of a GPU, from its earliest start to its end; times are of CLOCK_MONOTONIC."""

    gpu: int
    process_id: int
    start_ns: int
    end_ns: int
    kind: str
    stream: int = 0
    bytes_moved: int = 0
    work_ns: int = 0
    """Its duration on an idle GPU; `end_ns - start_ns` is longer if kernels of other programs ran."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two processes whose work ran on one GPU at the same time."""

    first: Busy
    second: Busy

    @property
    def overlap_ns(self) -> int:
        """Duration of the intersection."""
        return min(self.first.end_ns, self.second.end_ns) - max(self.first.start_ns, self.second.start_ns)


def _open(state: Path) -> mmap.mmap:
    try:
        with state.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise StateFileError(f"cannot read the state of the simulated GPUs at {state}: {error}") from error
    if len(view) < _HEADER.size:
        raise StateFileError(f"{state} is too short to be the state of simulated GPUs")
    magic, version = _HEADER.unpack_from(view)[:2]
    if magic != _MAGIC or version != _VERSION:
        raise StateFileError(f"{state} is not the state of simulated GPUs of version {_VERSION}; remove it")
    return view


def read_cards(state: Path) -> list[Card]:
    """The GPUs of a state file, in the order of their indices."""
    view = _open(state)
    cards = []
    for index in range(_HEADER.unpack_from(view)[2]):
        raw, capacity_bytes, card, instance, switches = _GPU.unpack_from(view, _HEADER.size + index * _GPU.size)
        text = raw.hex()
        name = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        cards.append(Card(index, f"{'MIG' if instance else 'GPU'}-{name}", capacity_bytes, card, switches))
    return cards


def gpus_of(state: Path, spec: str, *, exactly: bool = False) -> tuple[SimulatedCards, bool]:
    """The GPUs of a state file, MIG instances together, and whether they are those of the spec.

    An empty spec takes any GPUs, one without a capacity also more GPUs of any size, unless `exactly`.  Raises
    ValueError and StateFileError.
    """
    parts: dict[int, list[int]] = {}
    for card in read_cards(state):
        parts.setdefault(card.card, []).append(card.capacity_bytes)
    found = SimulatedCards(len(parts), sum(parts[0]))
    if not spec:
        return found, True
    asked, number = parse_cards(spec), len(parts[0])
    same = found == SimulatedCards(asked.gpus, asked.capacity_bytes // number * number)
    return found, same or (not exactly and "x" not in spec and found.gpus >= asked.gpus)


def is_usable(state: Path, spec: str) -> bool:
    """Whether a simulation of these GPUs can begin with this file, or makes it.  Raises ValueError."""
    try:
        return not state.exists() or gpus_of(state, spec, exactly=True)[1]
    except StateFileError:
        return False


def read_trace(state: Path, since: int = 0) -> list[Busy]:
    """The records of the ring from number `since` on, in the order of writing."""
    view = _open(state)
    _, _, _, offset, records, following = _HEADER.unpack_from(view)
    trace = []
    for number in range(max(since, following - records), following):
        place = offset + (number % records) * _RECORD.size
        sequence, start_ns, end_ns, stream, moved, work_ns, process_id, gpu, kind = _RECORD.unpack_from(view, place)
        if sequence != number + 1 or struct.unpack_from("<Q", view, place)[0] != sequence:
            continue  # being written, or its writer was killed
        trace.append(Busy(gpu, process_id, start_ns, end_ns, _KINDS.get(kind, "unknown"), stream, moved, work_ns))
    return trace


def trace_length(state: Path) -> int:
    """The number of records ever begun; as `since` it selects later records."""
    return int(_HEADER.unpack_from(_open(state))[5])


def merged(trace: Iterable[Busy]) -> list[Busy]:
    """The busy intervals of each GPU and process (kind "busy"), by start; `work_ns` is the sum of their operations."""
    groups: dict[tuple[int, int], list[Busy]] = defaultdict(list)
    for busy in trace:
        groups[busy.gpu, busy.process_id].append(busy)
    result: list[Busy] = []
    for (gpu, process_id), group in groups.items():
        spans: list[tuple[int, int, int]] = []
        for busy in sorted(group, key=lambda one: one.start_ns):
            if spans and busy.start_ns <= spans[-1][1]:
                start_ns, end_ns, work_ns = spans[-1]
                spans[-1] = (start_ns, max(end_ns, busy.end_ns), work_ns + busy.work_ns)
            else:
                spans.append((busy.start_ns, busy.end_ns, busy.work_ns))
        result += [
            Busy(gpu, process_id, start_ns, end_ns, "busy", work_ns=work_ns) for start_ns, end_ns, work_ns in spans
        ]
    return sorted(result, key=lambda one: (one.start_ns, one.end_ns))


def overlaps(trace: Sequence[Busy]) -> list[Overlap]:
    """Pairs of busy intervals of different processes on one GPU that intersect (touching ends do not)."""
    found: list[Overlap] = []
    running: dict[int, list[Busy]] = defaultdict(list)
    for busy in merged(trace):
        live = [one for one in running[busy.gpu] if one.end_ns > busy.start_ns]
        if busy.end_ns > busy.start_ns:
            found += [Overlap(one, busy) for one in live if one.process_id != busy.process_id]
            live.append(busy)
        running[busy.gpu] = live
    return found
