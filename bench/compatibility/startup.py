"""Rows of the compatibility page about start-up.

Stages: frameworks until they are imported, until they know their GPUs, to their first result from one, and to their
end; by the clock, and by the time of processors, which other programs disturb less.  The programs are started with the
hook's environment as `nvshare-run` makes it, but not through `nvshare-run`, whose own start is not the hook's.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture
from nvshare.bench.harness.progress import track
from nvshare.client_hook.launcher import ClientOptions, client_environment, find_hook

FIRST_USE = {
    "torch": ("torch.cuda.is_available()", "torch.zeros(1, device='cuda').add_(1).cpu()"),
    "cupy": ("cupy.cuda.runtime.getDeviceCount()", "cupy.zeros(1).get()"),
    "jax": ("jax.devices()", "jax.numpy.zeros(1).block_until_ready()"),
}
"""Code that makes a framework look for GPUs, and code that gives a first result."""

STAGES = (
    "to the import's end", "from there until it knows its GPUs", "from there to the first result",
    "from there to the end",
)  # fmt: skip
PAIRS_MIN = 6
"""The fewest whose extremes enclose the median with a probability of 95 %."""

Stages = list[tuple[float, float]]
"""Milliseconds of the clock and of processors of one start, in each of STAGES and in all of them."""


def hooked_environment(stand: Fixture, name: str = "") -> dict[str, str]:
    """Environment of a client of that coordinator, in memory mode NVSHARE_MEMORY, `device` without it."""
    options = ClientOptions(name=name or None)
    return client_environment(
        stand.environment(), hook=find_hook(os.environ), runtime_dir=stand.directory, options=options
    )


def import_rows(stand: Fixture, modules: Sequence[str], *, pairs: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of the compatibility matrix: a start of the interpreter, in STAGES."""
    plain, hooked = stand.environment(), hooked_environment(stand, "start-up")
    for module in modules:
        mode = hooked["NVSHARE_MEMORY"]
        row: dict[str, Any] = {"case": f"start-up, {module}", "group": "start-up", "mode": mode, "result": "ok"}
        if importlib.util.find_spec(module) is None:
            yield row | {"result": "skipped", "reason": f"{module} not installed"}
            continue
        try:
            told = imports(module, plain, hooked, pairs=pairs, deadline=deadline)
        except BenchError as error:
            yield row | {"result": "failed", "reason": str(error)}
            continue
        if told["pairs"] < PAIRS_MIN:
            why = f"no time left: {told['pairs']} pairs, and fewer than {PAIRS_MIN} say nothing"
            yield row | {"result": "skipped", "reason": why}
            continue
        yield row | {"startup": told}


def one_start(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Stages:
    """Times of one start's stages, its threads included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic_ns()
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    ended, after = time.monotonic_ns(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise BenchError(done.stderr.strip()[-300:] or f"exit code {done.returncode}")
    used_s = sum(getattr(after, which) - getattr(before, which) for which in ("ru_utime", "ru_stime"))
    told = [int(word) for word in done.stdout.split()[-2 * (len(STAGES) - 1) :]]
    moments = [(begin, 0.0), *zip(told[0::2], told[1::2], strict=True), (ended, used_s * 1e9)]
    stages = [*itertools.pairwise(moments), (moments[0], moments[-1])]
    return [((end[0] - start[0]) / 1e6, (end[1] - start[1]) / 1e6) for start, end in stages]


def imports(
    module: str, plain: Mapping[str, str], hooked: Mapping[str, str], *, pairs: int, deadline: float
) -> dict[str, Any]:
    """Starts without and with the hook in turns, as many pairs as there is time for."""
    moment = "moments += [time.monotonic_ns(), time.process_time_ns()]"
    steps = "".join(f"{step}\n{moment}\n" for step in (f"import {module}", *FIRST_USE[module]))
    code = f"import time\nmoments = []\n{steps}print(*moments)"
    command = [sys.executable, "-c", code]
    taken: dict[bool, list[Stages]] = {False: [], True: []}
    with suppress(subprocess.TimeoutExpired):  # no time left
        for number in track(range(-1, pairs), "pair"):
            if time.monotonic() >= deadline:
                break
            pair: dict[bool, Stages] = {}
            for under_hook in (False, True) if number % 2 == 0 else (True, False):
                environment = hooked if under_hook else plain
                pair[under_hook] = one_start(command, environment, max(0.1, deadline - time.monotonic()))
            for under_hook in pair if number >= 0 else ():  # the first pair warms the caches
                taken[under_hook].append(pair[under_hook])
    found: dict[str, Any] = {"pairs": len(taken[False])}
    if found["pairs"] < PAIRS_MIN:
        return found
    for at, stage in enumerate((*STAGES, "all")):
        found[stage] = {}
        for kind, what in enumerate(("wall", "cpu")):
            before, after = ([stages[at][kind] for stages in taken[side]] for side in (False, True))
            found[stage] |= paired(what, before, after)
    return found


def paired(what: str, before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Medians, and between what the median of all possible differences lies in at least 95 of 100 cases.

    By ranks: that the true median is below the k-th smallest of n differences is as likely as fewer than k heads in n
    throws of a coin, whatever their distribution.  With fewer than PAIRS_MIN not even the extremes are good enough.

    `quickest`: the quickest after, less the quickest before.  What disturbs a start only ever makes it slower, so where
    starts differ by more than is asked for this tells more, though nothing of how sure it is.
    """
    added = sorted(b - a for a, b in zip(before, after, strict=True))
    beyond, total = 0, 2 ** len(added)
    outside = -1
    while 2 * (beyond + math.comb(len(added), outside + 1)) <= 0.05 * total:
        outside += 1
        beyond += math.comb(len(added), outside)
    found = {
        f"plain_{what}_ms": statistics.median(before), f"added_{what}_ms": statistics.median(added),
        f"added_{what}_ms_min": added[outside], f"added_{what}_ms_max": added[-1 - outside],
        f"quickest_{what}_ms": min(after) - min(before),
    }  # fmt: skip
    return {name: round(value, 1) for name, value in found.items()}
