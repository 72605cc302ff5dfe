"""The figures of a hardware run as a short table: `python bench/harness/summary.py DIRECTORY` (written by hardware.sh).

Non-goals: measuring.  A file that is missing or no JSON is said to be so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILES = ("demo.json", "gate.json", "handover.json", "handover3.json", "turns.json", "gangs.json", "pairs.json")
WHERE_POSSIBLE = ("gangs.json", "pairs.json")
"""Files that are not measured on every machine."""
SHOWN = (
    *("violations", "handovers", "handover_us", "baseline_ns", "hooked_ns", "added_ns", "added_instructions"),
    *("geometric_means", "exchange", "gang_over_alone", "apart_over_alone", "rivals_over_half"),
)


def judged(told: dict[str, Any]) -> list[str]:
    """The figures of one benchmark that a run is judged by."""
    return [f"{name} {json.dumps(told[name])}" for name in SHOWN if name in told]


def main() -> int:
    """Command line."""
    directory = Path(sys.argv[1])
    print("| file | figures |\n|---|---|")
    for name in FILES:
        if name in WHERE_POSSIBLE and not (directory / name).exists():
            continue
        try:
            found = judged(json.loads((directory / name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            found = [f"nothing ({type(error).__name__}: {error})"]
        print(f"| {name} | {'<br>'.join(found)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
