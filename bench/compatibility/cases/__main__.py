"""Runs one case on request: `python -m nvshare.bench.compatibility.cases FRAMEWORK.NAME`.

It imports the framework, prints `{"ready": true}`, and answers each line with one JSON object:

    check           -> {"digest", "values", "tolerance", "timed", "versions"} or {"skipped": why} or {"error": why}
    time SECONDS    -> {"ns": of one step}

Invariants: CUDA is not touched before the first line.  Standard output carries answers only; what frameworks print goes
to standard error.  A case that raises is an answer, not the end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

from nvshare.bench.compatibility.cases import Program, Skipped

FRAMEWORKS = ("torch", "triton", "transformers", "diffusers", "cupy", "jax", "numba", "numba_cuda", "tinygrad", "vllm")


def versions() -> dict[str, str]:
    """Versions of the frameworks that are in use."""
    used = {name: sys.modules[name] for name in FRAMEWORKS if name in sys.modules}
    return {name: str(module.__version__) for name, module in used.items() if hasattr(module, "__version__")}


def step_ns(program: Program, seconds: float) -> float:
    """Nanoseconds of a step: the mean over at least half of this time, after steps that compile and fill caches."""
    if program.step is None:
        raise Skipped("it has no steps")
    steps = 4
    while True:
        program.synchronize()
        begin_ns = time.monotonic_ns()
        for _ in range(steps):
            program.step()
        program.synchronize()
        taken_ns = time.monotonic_ns() - begin_ns
        if steps > 4 and taken_ns >= seconds * 5e8:
            return taken_ns / steps
        steps *= 2


def answer(program: Program, words: list[str]) -> dict[str, Any]:
    """The answer to one request."""
    if words[0] == "check":
        outcome = program.check()
        return {
            "digest": outcome.digest,
            "values": outcome.values[-64:],
            "tolerance": outcome.tolerance,
            "timed": program.step is not None,
            "versions": versions(),
        }
    return {"ns": step_ns(program, float(words[1]))}


def main() -> int:
    """Command line."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m nvshare.bench.compatibility.cases FRAMEWORK.NAME\n")
        return 2
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    framework, _, name = sys.argv[1].partition(".")
    make = importlib.import_module(f"nvshare.bench.compatibility.cases.{framework}_cases").CASES[name]
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            told = answer(make(), line.split())
        except (Skipped, ModuleNotFoundError) as reason:
            told = {"skipped": str(reason)}
        except Exception as error:  # the row says it
            told = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
        print(json.dumps(told), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
