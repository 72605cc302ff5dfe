"""Gathers the doctor's facts from the system.  Changes nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from nvshare.client_hook.launcher import LaunchError, find_hook, package_root
from nvshare.client_hook.python_environment import environment_without_nvshare
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.cli.doctor.facts import CoordinatorFacts, DirectoryFacts, Facts, MachineFacts, ShellFacts
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.kubernetes.slots import boundary
from nvshare.coordinator.system import host_memory
from nvshare.coordinator.system.checkpoints import cannot_park
from nvshare.coordinator.system.devices import nvml
from nvshare.coordinator.system.gpu_processes import computing_processes, unhooked_processes
from nvshare.coordinator.system.mps.obstacles import DEFAULT_PIPE_DIRECTORY, answers
from nvshare.coordinator.system.processes import read_process
from nvshare.coordinator.system.runtime_dir import RuntimeDir, connect_error
from nvshare.coordinator.system.version import version


def gather(directory: RuntimeDir, process_id: int | None) -> Facts:
    """All facts; `process_id` is the program to be examined."""
    environ = dict(os.environ)
    process = None if process_id is None else read_process(process_id)
    python = shutil.which("python") or shutil.which("python3") or ""
    unhooked = unhooked_processes(computing_processes())
    return Facts(
        machine=_machine(environ, directory),
        directory=_directory(directory),
        coordinator=_coordinator(directory),
        shell=ShellFacts(os.geteuid(), environ, (environment_without_nvshare(python) or "") if python else ""),
        memory_bytes=host_memory.memory_bytes(process="self" if process is None else str(process.process_id)),
        wanted=process_id,
        process=process,
        process_without_nvshare=_environment_of(process.process_id) if process is not None else "",
        unhooked=tuple(unhooked),
    )


def _machine(environ: dict[str, str], directory: RuntimeDir) -> MachineFacts:
    driver, error, cards = _driver()
    hook, hook_error = "", ""
    try:
        hook = str(find_hook(environ))
    except LaunchError as failure:
        hook_error = str(failure)
    named = environ.get("CUDA_MPS_PIPE_DIRECTORY")
    pipes = [Path(named)] if named else []
    return MachineFacts(
        version=version(),
        installation=str(package_root()),
        installed_s=Path(hook).stat().st_mtime if hook else 0.0,
        driver=driver,
        driver_error=error,
        cards=cards,
        memory_mode=_memory_mode(environ, directory),
        glibc=_glibc(),
        hook=hook,
        hook_error=hook_error,
        hook_glibc=_needed_glibc(hook),
        mps_directory=next((str(pipe) for pipe in (*pipes, DEFAULT_PIPE_DIRECTORY) if answers(pipe)), ""),
        cannot_park=cannot_park(),
        no_boundary=boundary.obstacle(driver, _toolkit()),
    )


def _toolkit() -> str:
    """Version of NVIDIA's container toolkit; empty without one."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-ctk", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        found = re.search(r"version (\d+\.\d+\.\d+)", done.stdout)
        return found[1] if found else ""
    return ""


def _driver() -> tuple[str, str, tuple[str, ...]]:
    """Version, error and cards of the driver."""
    import pynvml

    try:
        with nvml():
            version = pynvml.nvmlSystemGetDriverVersion()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return version, "", tuple(map(pynvml.nvmlDeviceGetName, handles))
    except pynvml.NVMLError as error:
        return "", str(error), ()


_AUTO: Final = """
import ctypes
cuda, number, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
def has(attribute, gpu):
    return cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, gpu) == 0 and value.value != 0
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0 and number.value > 0:
    gpus = range(number.value)
    integrated, chunked, managed = ([has(number, gpu) for gpu in gpus] for number in (18, 102, 89))
    found = (any(integrated), "integrated"), (all(chunked), "swap"), (any(managed), "managed"), (True, "device")
    print(next(mode for holds, mode in found if holds))
"""
"""The rule of client_hook/src/memory/backend.c: the host's memory, virtual memory management, managed access beside the
GPU's."""


def _memory_mode(environ: dict[str, str], directory: RuntimeDir) -> str:
    """Asked in a process of its own, because a broken driver may hang in cuInit."""
    if directory.simulated_gpu.exists():
        from nvshare.simulated_gpu.environment import simulated_environment

        environ = simulated_environment(directory.simulated_gpu, None, environ)
    command = [sys.executable, "-c", _AUTO]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        made = {**environ, "NVSHARE_DISABLE": "1"}
        done = subprocess.run(command, env=made, capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip()
    return ""


def _glibc() -> tuple[int, int] | None:
    name, version = platform.libc_ver()
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if name == "glibc" and found else None


def _needed_glibc(hook: str) -> tuple[int, int] | None:
    """The newest version of glibc's symbols that the library names."""
    try:
        content = Path(hook).read_bytes() if hook else b""
    except OSError:
        return None
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", content)
    return max(((int(major), int(minor)) for major, minor in versions), default=None)


def _directory(directory: RuntimeDir) -> DirectoryFacts:
    try:
        found = directory.path.stat()
    except OSError:
        return DirectoryFacts(str(directory.path), False, 0, 0, "ENOENT", "ENOENT")
    errors = map(connect_error, (directory.hooks_socket, directory.control_socket))
    hooks, control = (errno.errorcode.get(error, "") for error in errors)
    return DirectoryFacts(str(directory.path), True, found.st_uid, found.st_mode & 0o7777, hooks, control)


def _coordinator(directory: RuntimeDir) -> CoordinatorFacts:
    try:
        return CoordinatorFacts(call(directory, api.Status()), "")
    except (ControlError, NoCoordinatorError) as error:
        return CoordinatorFacts(None, str(error))


def _environment_of(process_id: int) -> str:
    """The Python environment of a process, if nvshare is not installed there; by its command line."""
    with contextlib.suppress(OSError, IndexError):
        program = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        path = program if program.startswith("/") else shutil.which(program)
        return (environment_without_nvshare(path) or "") if path else ""
    return ""
