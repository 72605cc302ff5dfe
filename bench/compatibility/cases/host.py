"""Runs cases on request: `python -m nvshare.bench.compatibility.cases.host FRAMEWORK`.

The protocol is that of `harness/worker_group.py`.  A case is called FRAMEWORK.NAME; FRAMEWORK_cases is a module beside
this or in programs/, with `CASES` (name -> function that makes the Program) and `versions()`.  The one that is named at
the start is imported before `ready`, others when they are first needed.

Invariants: the real standard output carries answers only; what frameworks print goes to standard error.  A case that
raises is an answer, not the end.  One case's program is alive at a time.

Non-goals: a framework.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import IO, Any

from nvshare.bench.compatibility.cases.program import Program, Skipped


def cases_of(framework: str) -> Any:
    """The module with a framework's cases."""
    places = [f"nvshare.bench.compatibility.{folder}.{framework}_cases" for folder in ("cases", "programs")]
    return importlib.import_module(next((name for name in places if importlib.util.find_spec(name)), places[0]))


@dataclass(slots=True)
class Host:
    """The case that is alive."""

    name: str = ""
    program: Program | None = None

    def use(self, name: str) -> Program:
        """The program of a case; the one before is dropped first."""
        if self.program is None or self.name != name:
            self.program = None
            gc.collect()
            framework, _, case = name.partition(".")
            self.name, self.program = name, cases_of(framework).CASES[case]()
        return self.program

    def answer(self, words: list[str]) -> dict[str, Any]:
        """The answer to one request."""
        program = self.use(words[1])
        if words[0] == "check":
            outcome = program.check()
            return {
                "digest": outcome.digest,
                "values": outcome.values[-64:],
                "tolerance": outcome.tolerance,
                "timed": program.step is not None,
                "versions": cases_of(words[1].partition(".")[0]).versions(),
            }
        if program.step is None:
            return {"error": f"{words[1]} has no steps"}
        program.synchronize()
        begin = time.monotonic_ns()
        for _ in range(int(words[2])):
            program.step()
        program.synchronize()
        return {"ns": time.monotonic_ns() - begin}


def serve(host: Host, answers: IO[str]) -> None:
    """Answers requests until the input ends."""
    for line in sys.stdin:
        try:
            told = host.answer(line.split())
        except (Skipped, ModuleNotFoundError) as reason:
            told = {"skipped": str(reason)}
        except Exception as error:  # the row says it
            text = f"{type(error).__name__}: {error}".strip()
            told = {"error": text.splitlines()[0][:300]}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def main() -> int:
    """Command line."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m nvshare.bench.compatibility.cases.host FRAMEWORK\n")
        return 2
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    cases_of(sys.argv[1])
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    serve(Host(), answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
