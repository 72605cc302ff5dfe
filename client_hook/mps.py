"""Joins a program to the coordinator's MPS at its start, by the variables that CUDA reads when it is initialised.

The coordinator answers on `mps.sock` with the pipe directory, or with a refusal that the user sees in one line.  The
connection is an inheritable descriptor: the coordinator counts the program until its last process has closed it.

Invariants: without a coordinator that allows MPS this costs one failed `connect`, and prints nothing.  A program that
cannot join runs without MPS.  The wait has a bound.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from nvshare.coordinator.system.runtime_dir import RuntimeDir

ANSWER_TIMEOUT_S = 20.0
"""Longer than the coordinator waits for the daemon's start."""
_ANSWER_BYTES = 4096
_FIRST_DESCRIPTOR = 200
_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
_OUT = ("0", "off")
_SHARES = {"best-effort": ("1", "90")}
"""Priority (1 is lower) and percentage of the multiprocessors, by class."""
_UNSUPPORTED = ("cuda-gdb", "compute-sanitizer", "cuda-memcheck", "ncu", "nv-nsight-cu-cli", "cuda-checkpoint")
"""Tools that need a program with a context of its own."""


def with_mps(environ: Mapping[str, str], directory: RuntimeDir, program: str = "") -> dict[str, str]:
    """`environ` with the variables of an MPS client if the coordinator lets the program join.

    `NVSHARE_MPS` is `1` for a client; `0` or `off` keeps the program out.
    """
    made = dict(environ)
    inherited = made.get("CUDA_MPS_PIPE_DIRECTORY")
    if made.get("NVSHARE_MPS") == "1" or inherited == str(directory.mps / "pipe"):  # this process is a client
        made = _cleared(made)
        inherited = None
    if environ.get("NVSHARE_MPS") in _OUT:
        made["NVSHARE_MPS"] = "0"
        return made
    connection = _connect(directory.mps_socket)
    if connection is None:
        return made
    try:
        if inherited:
            _say(f"without the coordinator's MPS: CUDA_MPS_PIPE_DIRECTORY is {inherited}; unset it to join")
            return made
        if os.path.basename(program) in _UNSUPPORTED:
            _say(f"without MPS: {os.path.basename(program)} needs a program with a context of its own")
            return without_mps(made)
        state, _, text = _answer(connection).partition("\n")
        if state != "joined":
            _say(f"without MPS: {text}")
            return made
        os.set_inheritable(_keep(connection), True)
    finally:
        connection.close()
    priority, percentage = _SHARES.get(made.get("NVSHARE_CLASS", "").replace("_", "-"), ("0", "100"))
    made["NVSHARE_MPS"] = "1"
    made["CUDA_MPS_PIPE_DIRECTORY"] = text
    made.setdefault("CUDA_MPS_CLIENT_PRIORITY", priority)
    made.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage)
    return made


def without_mps(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` of a program that stays out, with all that it starts."""
    return (_cleared(environ) if environ.get("NVSHARE_MPS") == "1" else dict(environ)) | {"NVSHARE_MPS": "0"}


def _cleared(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in ("NVSHARE_MPS", *_VARIABLES)}


def _connect(path: Path) -> socket.socket | None:
    """None without a coordinator that allows MPS."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        connection.connect(os.fspath(path))
    except OSError:
        connection.close()
        return None
    return connection


def _answer(connection: socket.socket) -> str:
    """The coordinator's: `joined` and the pipe directory, or `refused` and the reason."""
    try:
        answer = connection.recv(_ANSWER_BYTES)
    except OSError as error:
        return f"refused\nthe coordinator does not answer ({error}); see its log"
    return os.fsdecode(answer) or "refused\nthe coordinator ends"


def _keep(connection: socket.socket) -> int:
    """A duplicate whose number scripts do not use."""
    import fcntl

    try:
        return fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD, _FIRST_DESCRIPTOR)
    except OSError:  # a low limit on open files
        return fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD, 10)


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"nvshare: {text}\n")
