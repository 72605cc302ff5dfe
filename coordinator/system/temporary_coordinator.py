"""A coordinator for the demo and the benchmarks.  Its environment has no hook."""

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


def start_coordinator(directory: Path, options: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
    """A coordinator that serves this runtime directory.  Raises LaunchError with the end of its log."""
    ready, report = os.pipe()
    command = [sys.executable, "-P", "-m", "nvshare.coordinator.daemon.main"]
    command += ["--runtime-dir", str(directory), "--ready-fd", str(report), *options]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=coordinator_environment(os.environ),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(report,), cwd="/",
        )  # fmt: skip
    os.close(report)
    try:
        if os.read(ready, 1) == b"":
            end(process)
            raise LaunchError(f"the coordinator did not start:\n{end_of_log(log)}")
    finally:
        os.close(ready)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends it in order, else by force."""
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def temporary_coordinator(directory: Path, options: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """As `start_coordinator`; the coordinator ends with the block."""
    process = start_coordinator(directory, options, log=log)
    try:
        yield process
    finally:
        end(process)
