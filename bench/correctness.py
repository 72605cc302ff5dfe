"""Do shared programs compute what they compute alone?  `python -m nvshare.bench.correctness --json`, on a real card.

For PyTorch and CuPy, as far as they are installed: one program (workloads/digest.py) without the hook, then two at
once under it with a short quantum, in `device` mode and in `managed` mode.  All digests of a framework must be equal.

Invariant: managed memory stays within the card: each program has a limit of 128 MiB.  Exit code 1 on any difference.

Non-goals: speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture, fixture, machine, real_card
from nvshare.bench.harness.progress import showing

LIMIT = "128MiB"
MODES: dict[str, tuple[str, ...]] = {
    "device": ("--memory", "device"),
    "managed": ("--memory", "managed", "--gpu-memory-limit", LIMIT),
}


def digest(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What one program computed.  Raises BenchError."""
    out, _ = process.communicate(timeout=300)
    if process.returncode != 0:
        raise BenchError(f"exit code {process.returncode}")
    told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return told


def compare(stand: Fixture, framework: str, steps: int) -> dict[str, Any]:
    """One framework in all modes."""
    command = [sys.executable, "-m", "nvshare.bench.workloads.digest", framework, str(steps)]
    alone = digest(stand.start(command, hooked=False))
    found: dict[str, Any] = {"alone": alone, "equal": True}
    for mode, options in MODES.items():
        names = [f"{framework}-{mode}-{number}" for number in range(2)]
        pair = [stand.start(command, hooked=True, name=name, options=options) for name in names]
        found[mode] = []
        for process in pair:
            try:
                told = digest(process)
            except BenchError as error:
                told = {"error": str(error)}
            found[mode].append(told)
            found["equal"] &= told.get("digest") == alone["digest"]
    found["handovers"] = handovers(stand)
    return found


def handovers(stand: Fixture) -> Any:
    """How often the GPU changed hands meanwhile, as the coordinator tells: without any, nothing was shown."""
    status = stand.control("status")
    return [gpu.get("handovers") for gpu in status["gpus"]]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m nvshare.bench.correctness", description="Results alone and shared")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--steps", type=int, default=2000, help="length of the programs (default 2000)")
    parser.add_argument("--quantum", default="20ms", help="default 20ms")
    options = parser.parse_args()
    if not real_card():
        sys.stderr.write("nvshare.bench.correctness: needs a real card: the simulated GPU computes nothing\n")
        return 1
    result: dict[str, Any] = {"machine": machine(), "frameworks": {}}
    for framework in ("torch", "cupy"):
        if importlib.util.find_spec(framework) is None:
            continue
        try:
            with showing(framework), fixture(simulate=None, quantum=options.quantum) as stand:
                result["frameworks"][framework] = compare(stand, framework, options.steps)
        except BenchError as error:
            result["frameworks"][framework] = {"equal": False, "error": str(error)}
    result["equal"] = bool(result["frameworks"]) and all(one["equal"] for one in result["frameworks"].values())
    if options.json:
        print(json.dumps(result))
    else:
        for framework, one in result["frameworks"].items():
            print(f"{framework}: {'equal' if one['equal'] else 'DIFFERENT'}")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
