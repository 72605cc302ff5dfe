"""Obstacles to the start of MPS, each with its remedy: no binary, another daemon, an unsupported card, a long path."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nvshare.coordinator.system.devices import mig_enabled, nvml
from nvshare.coordinator.system.runtime_dir import MAX_SOCKET_PATH_BYTES, connect_error

BINARY: Final = "nvidia-cuda-mps-control"
DEFAULT_PIPE_DIRECTORY: Final = Path("/tmp/nvidia-mps")
LONGEST_SOCKET: Final = "control_privileged"
_LEAST_CAPABILITY: Final = (7, 0)
"""Volta: the first cards whose MPS clients have address spaces of their own and a share of the multiprocessors."""


def find_binary(environ: Mapping[str, str]) -> str | None:
    """Path of the control daemon's program."""
    return shutil.which(BINARY, path=environ.get("PATH"))


def find_obstacle(pipe_directory: Path, environ: Mapping[str, str], *, real_cards: bool) -> str | None:
    """The reason why no daemon can start for this pipe directory, with the remedy; None without one.

    `real_cards` False: simulated ones, which the machine's daemons and NVML do not concern.
    """
    if find_binary(environ) is None:
        return f"{BINARY} is not in PATH; install it (package nvidia-compute-utils of the driver's version)"
    if len(os.fsencode(pipe_directory / LONGEST_SOCKET)) > MAX_SOCKET_PATH_BYTES:
        return f"{pipe_directory} is too long for the daemon's sockets; choose a shorter --runtime-dir"
    named = environ.get("CUDA_MPS_PIPE_DIRECTORY")
    for directory in (Path(named) if named else DEFAULT_PIPE_DIRECTORY, DEFAULT_PIPE_DIRECTORY):
        if directory != pipe_directory and answers(directory):
            remedy = f"stop it (`echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} {BINARY}`)"
            return f"another MPS control daemon answers in {directory}; {remedy}"
    return _obstacle_of_cards() or _foreign_process(Path("/proc"), pipe_directory) if real_cards else None


def answers(pipe_directory: Path) -> bool:
    """Whether a control daemon accepts connections in this pipe directory."""
    return connect_error(pipe_directory / "control") in (0, errno.EAGAIN)


def _foreign_process(proc: Path, pipe_directory: Path) -> str | None:
    """A control daemon or server of another pipe directory, also one whose directory this user cannot read."""
    own = b"CUDA_MPS_PIPE_DIRECTORY=" + os.fsencode(pipe_directory)
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (entry / "comm").read_text(encoding="utf-8", errors="replace").strip() != BINARY[:15]:
                continue  # the kernel's name of the daemon and of its server
            if (entry / "stat").read_bytes().rpartition(b") ")[2][:1] == b"Z":  # no parent waits for it
                continue
            user = entry.stat().st_uid
            with contextlib.suppress(OSError):  # of another user
                if own in (entry / "environ").read_bytes().split(b"\0"):
                    continue
            return f"an MPS process of user {user} runs on this machine (pid {entry.name}); stop that user's MPS first"
    return None


def _obstacle_of_cards() -> str | None:
    import pynvml

    try:
        with nvml():
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
                if capability < _LEAST_CAPABILITY:
                    has = ".".join(map(str, capability))
                    return f"GPU {index} has compute capability {has}, MPS here needs 7.0 (Volta); serve newer cards"
                if mig_enabled(pynvml, handle):
                    return f"GPU {index} is divided by MIG, which is not combined with MPS here; disable MIG"
    except pynvml.NVMLError as error:
        return f"NVML cannot describe the GPUs ({error}); check `nvidia-smi`"
    return None
