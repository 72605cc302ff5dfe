"""The command line that benchmarks share: `--json`, `--simulate`, one message for what went wrong.

Non-goals: options and texts of one benchmark.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from nvshare.bench.harness.fixture import BenchError, machine
from nvshare.coordinator.system.devices import real_card

T = TypeVar("T")


def parser_for(name: str, description: str, *, simulate: bool = True) -> argparse.ArgumentParser:
    """A parser for `python -m nvshare.bench.NAME` with the common options."""
    parser = argparse.ArgumentParser(prog=f"python -m nvshare.bench.{name}", description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    if simulate:
        parser.add_argument("--simulate", action="store_true", help="on the simulated GPU although there is a card")
    return parser


def add_figures(parser: argparse.ArgumentParser, **options: tuple[float | str, str]) -> None:
    """Adds options of the form name=(default, help); the default gives the type."""
    for name, (default, text) in options.items():
        flag, shown = f"--{name.replace('_', '-')}", default if isinstance(default, str) else f"{default:g}"
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default {shown})")


def names_of(text: str) -> list[str]:
    """The value of an option such as `--ways native,auto`; empty for all."""
    return [word for word in text.split(",") if word and word != "all"]


def simulated(options: argparse.Namespace, gpus: str) -> str | None:
    """The simulated GPUs to measure on; None: the real card."""
    return gpus if options.simulate or not real_card() else None


def step(text: str) -> None:
    """Says on a terminal's standard error what is done now; results go to standard output."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")


def track(items: Collection[T], what: str) -> Iterator[T]:
    """The items; each is named as "WHAT 2 of 5"."""
    for number, item in enumerate(items, start=1):
        step(f"{what} {number} of {len(items)}")
        yield item


def run_benchmark(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    fault: Callable[[dict[str, Any]], str] = lambda result: "",
) -> int:
    """Measures, adds the machine, then prints JSON or shows text.  Returns the exit code.

    It is 1 if nothing could be measured, or if `fault` says what is wrong with the result.
    """
    options = parser.parse_args()
    name = parser.prog.removeprefix("python -m ")
    try:
        result = measure(options)
        result.setdefault("machine", machine())
    except (BenchError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    if wrong := fault(result):
        sys.stderr.write(f"{name}: {wrong}\n")
    return 1 if wrong else 0
