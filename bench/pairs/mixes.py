"""Mixes of programs that run together, and the ways in which they share the card.

Non-goals: starting anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nvshare.bench.harness.fixture import BenchError
from nvshare.bench.workloads.driver_jobs import SHAPES


@dataclass(frozen=True, slots=True)
class Job:
    """A workload (workloads/pair_job.py), with variables for when it runs under the hook."""

    workload: str
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Mix:
    """Jobs that run at the same time."""

    name: str
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of sharing.  `coordinator`: its options; None: no hook.  `learns`: the policy gets time to settle."""

    name: str
    coordinator: tuple[str, ...] | None = None
    daemon: bool = False
    """Under a control daemon of MPS that the benchmark starts."""
    own_mps: bool = False
    """The coordinator may start MPS."""
    learns: bool = False
    others: tuple[str, ...] = ()
    """Ways that this one is compared with."""


TURNS = ("--sharing=exclusive", "--policy=round_robin", "--quantum=100ms")
WAYS = {
    way.name: way
    for way in (
        Way("native"),
        Way("turns", TURNS),
        Way("default", (), learns=True, others=("native", "turns")),
        Way("mps", daemon=True),
        Way("default_mps", ("--mps",), own_mps=True, learns=True, others=("mps", "native", "turns")),
    )
}


def mix(name: str) -> Mix:
    """`train+decode` -> the mix of these workloads."""
    return Mix(name, tuple(Job(workload) for workload in name.split("+")))


MODELS = frozenset({"decode", "train", "cnn"})
"""Trainings and decoders."""
FULL = (
    "products+products", "elementwise+products", "memory+products", "tiny+tiny", "products+tiny", "decode+decode",
    "train+decode", "train+train", "cnn+cnn", "data+train", "server+products", "server+elementwise",
    "products+products+tiny", "train+decode+server",
)  # fmt: skip


def chosen_mixes(names: Sequence[str]) -> list[Mix]:
    """The mixes of the command line.  Raises BenchError for a workload that there is not."""
    mixes = [mix(name) for name in names or FULL]
    for job in (job for one in mixes for job in one.jobs):
        if job.workload not in SHAPES:
            raise BenchError(f"unknown workload {job.workload!r}; known: {', '.join(SHAPES)}")
    return mixes


def chosen_ways(names: Sequence[str]) -> list[Way]:
    """The ways of the command line in the order of measuring.  Raises BenchError for a way that there is not."""
    for name in names:
        if name not in WAYS:
            raise BenchError(f"unknown way {name!r}; known: {', '.join(WAYS)}")
    return [way for way in WAYS.values() if not names or way.name in names]


def needed(mixes: Iterable[Mix]) -> Counter[Job]:
    """Numbers of programs of each job that are enough for each mix."""
    most: Counter[Job] = Counter()
    for one in mixes:
        most |= Counter(one.jobs)
    return most


def without_variables(mixes: Iterable[Mix]) -> list[Mix]:
    """The same workloads as programs that know nothing of the hook."""
    return [Mix(one.name, tuple(Job(job.workload) for job in one.jobs)) for one in mixes]
