"""Gain and cost of a gang: `python -m nvshare.bench.gangs --json`.

Two ranks of one job, each on a GPU, exchange something after each step: over NCCL where PyTorch is and the GPUs are
real, else a token through memory that both have mapped (`--exchange host`).  On each GPU a rival wants all of the time.
All programs are started once; then the same seconds are measured in turns:

- alone: the ranks without rivals, and the rivals without ranks, none of them under the hook;
- slicing: the same programs together, so as the card itself shares its time;
- apart, turns: ranks without and with `nvshare-run --gang`, beside rivals under the hook; one program at a time
  (`sharing` exclusive, `--quantum`);
- auto_apart, auto: the same with the coordinator's defaults, after `--settle` seconds in which it measures.

JSON: of each case `steps_per_s` of the job, `over_alone`; `rivals_steps_per_s`, `rivals_over_alone`; the longest step;
`total`: `over_alone` of the job and of the mean rival together.  Of the gang under `auto`: `gang_over_slicing`,
`rivals_over_slicing`, `gang_over_turns`, `rivals_over_turns`; `total_over_better`: its `total` by the larger one of
slicing and turns; `why`: what `nvshare-ctl explain` says of each GPU at the end.

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
from nvshare.bench.harness.fixture import BenchError, Fixture, coordinator, spread, uncoordinated
from nvshare.bench.harness.worker_group import Member
from nvshare.bench.workloads.gang import FILE_BYTES, RANKS
from nvshare.coordinator.system.devices import real_card

GANG: Final = "bench"
CASES: Final = ("slicing", "apart", "turns", "auto_apart", "auto")
"""Ranks and rivals together."""
SIMULATED: Final = "2x8GiB"
READY_S: Final = 90.0
"""Importing PyTorch ten times, ten contexts and three communicators."""
ANSWER_S: Final = 90.0
"""Time that a run may take beyond its length: ranks that are apart wait for each other's turns."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Everybody who takes part; `bare` are not under the hook."""

    bare: tuple[Member, ...]
    apart: tuple[Member, ...]
    gang: tuple[Member, ...]
    bare_rivals: tuple[Member, ...]
    rivals: tuple[Member, ...]


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(stand: Fixture, exchange: str, stack: ExitStack) -> WorkerGroup:
    """All programs, warmed up."""

    def member(name: str, *words: str, hooked: bool, options: Sequence[str] = ()) -> Member:
        command = [sys.executable, "-m", "nvshare.bench.workloads.gang", *words]
        made = Member(stand, command, hooked=hooked, name=name, options=options)
        stack.callback(made.kill)
        return made

    def ranks(name: str, *options: str, hooked: bool = True) -> tuple[Member, ...]:
        tokens = stand.directory / f"tokens-{name}"
        tokens.write_bytes(bytes(FILE_BYTES))
        place = [str(tokens), *([str(_port())] if exchange == "nccl" else [])]
        return tuple(
            member(f"{name}{number}", "rank", str(number), exchange, *place, hooked=hooked, options=options)
            for number in range(RANKS)
        )

    def rivals(name: str, *, hooked: bool) -> tuple[Member, ...]:
        return tuple(member(f"{name}{gpu}", "rival", str(gpu), exchange, hooked=hooked) for gpu in range(RANKS))

    group = WorkerGroup(
        ranks("bare", hooked=False),
        ranks("apart"),
        ranks("gang", f"--gang={GANG}"),
        rivals("bare-rival", hooked=False),
        rivals("rival", hooked=True),
    )
    for each in (*group.bare, *group.apart, *group.gang, *group.bare_rivals, *group.rivals):
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


def compare(stand: Fixture, group: WorkerGroup, options: argparse.Namespace) -> dict[str, Any]:
    """All cases in turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("alone", *CASES)}
    for _ in track(range(options.repetitions), "repetition"):
        alone = measure(stand, group.bare, (), options.seconds)
        runs["alone"].append(alone | measure(stand, (), group.bare_rivals, options.seconds))
        runs["slicing"].append(measure(stand, group.bare, group.bare_rivals, options.seconds))
        stand.control("set", "sharing", "exclusive")
        stand.control("set", "quantum", options.quantum)
        for name, ranks in (("apart", group.apart), ("turns", group.gang)):
            runs[name].append(measure(stand, ranks, group.rivals, options.seconds))
        stand.control("unset", "sharing")
        stand.control("unset", "quantum")
        for name, ranks in (("auto_apart", group.apart), ("auto", group.gang)):
            measure(stand, ranks, group.rivals, options.settle)
            runs[name].append(measure(stand, ranks, group.rivals, options.seconds))
    why = [gpu["why"] for gpu in stand.control("explain")["gpus"]]
    return figures(runs) | {"why": why}


def figures(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of the cases, and what is compared."""
    rates = {name: [float(run["steps_per_s"]) for run in case] for name, case in runs.items()}
    steps = {name: statistics.median(some) for name, some in rates.items()}
    rivals = {name: _medians(case, "rivals_steps_per_s") for name, case in runs.items()}

    def over(case: str, other: str) -> float:
        return round(steps[case] / steps[other], 3)

    def rivals_over(case: str, other: str) -> list[float]:
        return _figures([one / base for one, base in zip(rivals[case], rivals[other], strict=True)], 3)

    result: dict[str, Any] = {}
    for name, case in runs.items():
        result[name] = {
            "steps_per_s": {key: round(value, 2) for key, value in spread(rates[name]).items()},
            "rivals_steps_per_s": _figures(rivals[name]),
            "worst_ms": round(max(run["worst_ms"] for run in case), 1),
        }
    for name in CASES:
        progress, of_rivals = over(name, "alone"), rivals_over(name, "alone")
        result[name] |= {"over_alone": progress, "rivals_over_alone": of_rivals}
        result[name]["total"] = round(progress + statistics.mean(of_rivals), 3)
        result[name] |= {count: sum(run[count] for run in runs[name]) for count in ("gang_turns", "overdue")}
    better = max(result[name]["total"] for name in ("slicing", "turns"))
    return result | {
        "gang_over_slicing": over("auto", "slicing"),
        "rivals_over_slicing": rivals_over("auto", "slicing"),
        "gang_over_turns": over("auto", "turns"),
        "rivals_over_turns": rivals_over("auto", "turns"),
        "total_over_better": round(result["auto"]["total"] / better, 3),
    }


def _medians(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [statistics.median(values) for values in zip(*(run[name] for run in runs), strict=True)]


def _figures(values: Sequence[float], digits: int = 1) -> list[float]:
    return [round(value, digits) for value in values]


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
    with uncoordinated(simulate=simulate) as stand, coordinator(stand, []), ExitStack() as stack:
        _want_gpus(stand)
        found = compare(stand, start(stand, exchange, stack), options)
    return {
        **found,
        "exchange": exchange,
        "quantum": options.quantum,
        "seconds": options.seconds,
        "settle": options.settle,
        "simulated": simulate is not None,
    }


def _show(result: dict[str, Any]) -> None:
    where = "simulated GPUs" if result["simulated"] else result["machine"]["gpu"]
    print(f"two ranks over {result['exchange']} on {where}, a rival on each GPU; steps/s:")
    for name in ("alone", *CASES):
        case = result[name]
        total = f", total {case['total']:.2f}" if "total" in case else ""
        print(f"{name:10} {case['steps_per_s']['median']:8}, rivals {case['rivals_steps_per_s']}{total}")
    print(f"auto by the better of slicing and turns: {result['total_over_better']:.2f}", *result["why"], sep="\n")


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
        repetitions=(2, "of all cases"),
        settle=(7.0, "how long programs run under the defaults before they are measured"),
        quantum=("100ms", "length of a turn of `apart` and `turns`"),
    )
    parser.add_argument("--exchange", choices=("nccl", "host"), help="default nccl where PyTorch and real GPUs are")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
