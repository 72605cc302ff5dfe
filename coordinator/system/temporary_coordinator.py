"""A coordinator for the length of a `with` block, for the demo and the benchmarks.

The block begins when the coordinator serves; the coordinator ends with the block.  Its environment has no hook.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvshare.client_hook.embedded import end_of_log
from nvshare.client_hook.launcher import LaunchError, coordinator_environment

_GRACE_S = 10.0


@contextlib.contextmanager
def temporary_coordinator(directory: Path, options: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a coordinator in this runtime directory.  Raises LaunchError with the end of its log."""
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
            raise LaunchError(f"the coordinator did not start:\n{end_of_log(log)}")
        yield process
    finally:
        os.close(ready)
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
