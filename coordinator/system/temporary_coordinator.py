"""A coordinator for the length of a block: what the demo and the benchmarks stand on.

Invariants: the block begins when it serves; however the block ends the coordinator does too, in order if it can; it is
no client itself, whatever environment it is started from.

May not go here: the embedded coordinator, which outlives who started it (client_hook/embedded.py).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvshare.client_hook.embedded import last_words
from nvshare.client_hook.launcher import LaunchError, coordinator_environment

_GRACE_S = 10.0


@contextlib.contextmanager
def temporary_coordinator(directory: Path, options: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """In this runtime directory; `options` are its own.  Raises LaunchError with its words when it does not start."""
    ready, report = os.pipe()
    command = [sys.executable, "-P", "-m", "nvshare.coordinator.daemon.main"]
    command += ["--runtime-dir", str(directory), "--ready-fd", str(report), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=coordinator_environment(os.environ),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(report,), cwd="/",
        )  # fmt: skip
    os.close(report)
    try:
        if os.read(ready, 1) == b"":
            raise LaunchError(f"the coordinator did not start:\n{last_words(log)}")
        yield process
    finally:
        os.close(ready)
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
