"""A control daemon of MPS for the length of a `with` block.

Invariants: its pipe and log directories are the block's own, so that another daemon is neither used nor stopped; a
guard process stops it when the benchmark ends for whatever reason, SIGKILL too.

Non-goals: the daemon that the coordinator starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nvshare.bench.harness.fixture import BenchError

CONTROL = "nvidia-cuda-mps-control"
ANSWER_S = 20.0
STOP_S = 60.0

_GUARD = """
timeout 30 "$0" -d || exit 1
echo started
cat >/dev/null
servers=$(echo get_server_list | timeout 10 "$0" 2>/dev/null)
daemon=$(cat "$CUDA_MPS_PIPE_DIRECTORY/$(basename "$0").pid" 2>/dev/null)
echo quit -t 5 | timeout 20 "$0" >/dev/null 2>&1
[ -n "$daemon" ] || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do
  kill -0 "$daemon" 2>/dev/null || exit 0
  sleep 0.25
done
kill -9 $daemon $servers
"""
"""Starts the daemon, waits until its input ends, then stops the daemon, by force if it must be."""


@contextmanager
def control_daemon(directory: Path) -> Iterator[dict[str, str]]:
    """Yields the variables of a program that is to be a client.  Raises BenchError if there can be no daemon."""
    control = shutil.which(CONTROL)
    if control is None:
        raise BenchError(f"{CONTROL} is not on the PATH")
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(directory / "mps"),
        "CUDA_MPS_LOG_DIRECTORY": str(directory / "mps-log"),
    }
    for path in variables.values():
        Path(path).mkdir(exist_ok=True)
    with (directory / "mps-guard.log").open("w+", encoding="utf-8", errors="replace") as log:
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, control], env={**os.environ, **variables}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        assert guard.stdin is not None
        assert guard.stdout is not None
        try:
            if guard.stdout.readline() != "started\n":
                log.seek(0)
                raise BenchError(f"{CONTROL} -d failed: {log.read().strip()[-300:]}")
            yield variables
        finally:
            guard.stdin.close()
            try:
                guard.wait(STOP_S)
            except subprocess.TimeoutExpired:
                guard.kill()
                guard.wait()
            guard.stdout.close()


def _ask(variables: Mapping[str, str], command: str) -> list[str]:
    done = subprocess.run(
        [CONTROL], input=command + "\n", env={**os.environ, **variables},
        capture_output=True, text=True, timeout=ANSWER_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BenchError(f"{CONTROL}: {command}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout.split()


def clients(variables: Mapping[str, str]) -> int:
    """Programs that are clients of the daemon now."""
    return sum(len(_ask(variables, f"get_client_list {server}")) for server in _ask(variables, "get_server_list"))
