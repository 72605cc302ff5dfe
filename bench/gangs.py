"""Gain and cost of a gang: `python -m nvshare.bench.gangs --json`.

Two ranks of one job, each on a GPU, exchange something after each step: over NCCL where PyTorch is and the GPUs are
real, else a token through memory that both have mapped (`--exchange host`).  On each GPU a rival wants all of the time.
All programs are started once, under the hook; then the same seconds are measured in turns:

- alone: the ranks without rivals; and the rivals without ranks;
- apart: ranks that the coordinator knows nothing of, beside the rivals;
- gang: ranks that were started with `nvshare-run --gang`, beside the rivals.

JSON: of each case `steps_per_s` of the job and of each rival, and the longest step; `gang_over_alone` and
`apart_over_alone` (at best 0.5, less what switching costs); `rivals_over_half`: a rival's steps beside the gang by half
of its steps alone.

On the simulated GPU kernels take time and compute nothing, the coordinator and the hook are real.

Non-goals: the programs (workloads/gang.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from nvshare.bench.harness.command import add_figures, parser_for, run_benchmark, track
from nvshare.bench.harness.fixture import BenchError, Fixture, fixture, spread
from nvshare.bench.harness.worker_group import Member
from nvshare.bench.workloads.gang import FILE_BYTES, RANKS
from nvshare.coordinator.system.devices import real_card

GANG: Final = "bench"
SIMULATED: Final = "2x8GiB"
READY_S: Final = 90.0
"""Importing PyTorch six times, six contexts and two communicators."""
ANSWER_S: Final = 90.0
"""Time that a run may take beyond its length: ranks that are apart wait for each other's turns."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Everybody who takes part."""

    gang: tuple[Member, ...]
    apart: tuple[Member, ...]
    rivals: tuple[Member, ...]


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(stand: Fixture, exchange: str, stack: ExitStack) -> WorkerGroup:
    """All programs, warmed up."""

    def member(name: str, *words: str, options: Sequence[str] = ()) -> Member:
        command = [sys.executable, "-m", "nvshare.bench.workloads.gang", *words]
        made = Member(stand, command, hooked=True, name=name, options=options)
        stack.callback(made.kill)
        return made

    def ranks(name: str, *options: str) -> tuple[Member, ...]:
        tokens = stand.directory / f"tokens-{name}"
        tokens.write_bytes(bytes(FILE_BYTES))
        place = [str(tokens), *([str(_port())] if exchange == "nccl" else [])]
        return tuple(
            member(f"{name}{number}", "rank", str(number), exchange, *place, options=options) for number in range(RANKS)
        )

    group = WorkerGroup(
        ranks("gang", f"--gang={GANG}"),
        ranks("apart"),
        tuple(member(f"rival{gpu}", "rival", str(gpu), exchange) for gpu in range(RANKS)),
    )
    for each in (*group.gang, *group.apart, *group.rivals):
        each.answer(READY_S)
    return group


def counters(stand: Fixture) -> dict[str, int]:
    """The coordinator's counts so far: turns of gangs, and drains that were late."""
    status = stand.control("status")
    turns = sum(gang["turns"] for gang in status["gangs"])
    return {"gang_turns": turns, "overdue": sum(gpu["overdue"] for gpu in status["gpus"])}


def measure(stand: Fixture, ranks: Sequence[Member], rivals: Sequence[Member], seconds: float) -> dict[str, Any]:
    """Measures these programs at the same time."""
    before = counters(stand)
    for each in (*ranks, *rivals):
        each.tell(f"run {seconds}")
    rates = [_rate(each.answer(seconds + ANSWER_S)) for each in rivals]
    told = [each.answer(seconds + ANSWER_S) for each in ranks]
    found: dict[str, Any] = {}
    if told:
        assert len({one["steps"] for one in told}) == 1, "ranks take the same steps"
        found["steps_per_s"] = _rate(told[0])
        found["worst_ms"] = max(one["worst_ms"] for one in told)
    if rates:
        found["rivals_steps_per_s"] = rates
    if told and rates:
        found |= {name: count - before[name] for name, count in counters(stand).items()}
    return found


def _rate(told: dict[str, Any]) -> float:
    return float(told["steps"] / told["seconds"])


def compare(stand: Fixture, group: WorkerGroup, seconds: float, repetitions: int) -> dict[str, Any]:
    """All cases, `apart` and `gang` in turns."""
    alone = measure(stand, group.apart, (), seconds)
    rivals_alone = measure(stand, (), group.rivals, seconds)["rivals_steps_per_s"]
    cases: dict[str, list[dict[str, Any]]] = {"apart": [], "gang": []}
    for _ in track(range(repetitions), "repetition"):
        cases["apart"].append(measure(stand, group.apart, group.rivals, seconds))
        cases["gang"].append(measure(stand, group.gang, group.rivals, seconds))
    result: dict[str, Any] = {"alone": {**_rounded(alone), "rivals_steps_per_s": _figures(rivals_alone)}}
    for name, runs in cases.items():
        rates = [run["steps_per_s"] for run in runs]
        result[name] = {
            "steps_per_s": {key: round(value, 2) for key, value in spread(rates).items()},
            "worst_ms": round(max(run["worst_ms"] for run in runs), 1),
            "rivals_steps_per_s": _figures(_medians(runs, "rivals_steps_per_s")),
            "gang_turns": sum(run["gang_turns"] for run in runs),
            "overdue": sum(run["overdue"] for run in runs),
        }
        result[f"{name}_over_alone"] = round(statistics.median(rates) / alone["steps_per_s"], 4)
    beside = _medians(cases["gang"], "rivals_steps_per_s")
    result["rivals_over_half"] = _figures([2 * one / other for one, other in zip(beside, rivals_alone, strict=True)], 3)
    return result


def _medians(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [statistics.median(values) for values in zip(*(run[name] for run in runs), strict=True)]


def _figures(values: Sequence[float], digits: int = 1) -> list[float]:
    return [round(value, digits) for value in values]


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 2) for name, value in found.items()}


def _exchange(wanted: str | None, simulate: str | None) -> str:
    """NCCL wherever it can be."""
    torch = importlib.util.find_spec("torch") is not None
    if wanted == "nccl" and (simulate is not None or not torch):
        raise BenchError("NCCL needs PyTorch and real GPUs; --exchange host needs neither")
    return wanted or ("nccl" if torch and simulate is None else "host")


def _want_gpus(stand: Fixture) -> None:
    gpus = len(stand.control("status")["gpus"])
    if gpus < RANKS:
        raise BenchError(f"{RANKS} GPUs are needed, and there is {gpus}; --simulate {SIMULATED} makes some")


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = options.simulate or (None if real_card() else SIMULATED)
    exchange = _exchange(options.exchange, simulate)
    with fixture(simulate=simulate, quantum=options.quantum) as stand, ExitStack() as stack:
        _want_gpus(stand)
        found = compare(stand, start(stand, exchange, stack), options.seconds, options.repetitions)
    return {
        **found,
        "exchange": exchange,
        "quantum": options.quantum,
        "seconds": options.seconds,
        "simulated": simulate is not None,
    }


def _show(result: dict[str, Any]) -> None:
    where = "simulated GPUs" if result["simulated"] else result["machine"]["gpu"]
    print(f"two ranks over {result['exchange']} on {where}, a rival on each GPU; steps/s:")
    print(f"alone {result['alone']['steps_per_s']}")
    for name in ("apart", "gang"):
        case = result[name]
        rivals = f"rivals {case['rivals_steps_per_s']} (alone {result['alone']['rivals_steps_per_s']})"
        print(f"{name} {case['steps_per_s']['median']}, {rivals}")


def main() -> int:
    """Command line."""
    parser = parser_for("gangs", "Two ranks on two GPUs beside rivals", simulate=False)
    parser.add_argument(
        "--simulate", nargs="?", const=SIMULATED, metavar="GPUSxCAPACITY",
        help=f"on simulated GPUs although there are cards ({SIMULATED})",
    )  # fmt: skip
    add_figures(
        parser,
        seconds=(4.0, "how long each case is measured"),
        repetitions=(2, "of apart and gang"),
        quantum=("100ms", "length of a turn"),
    )
    parser.add_argument("--exchange", choices=("nccl", "host"), help="default nccl where PyTorch and real GPUs are")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
