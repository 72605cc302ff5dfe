"""Each call of the driver and each request to the system that the hook makes fails once, in a scene of everything.

Non-goals: what the program checks (programs/fault_sweep.c); the errors of single functions (test_every_error.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.conftest import ROOT, Built
from tests.end_to_end.test_sanitized import COMPLAINTS, sanitized
from tests.hook.compiled import compile_c
from tests.hook.scripted import ScriptedCoordinator

PROGRAM = Path(__file__).resolve().parent / "programs" / "fault_sweep.c"
BOUND_S = 240
MODES = ("device", "managed", "swap")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """The program, linked with the simulated driver."""
    include = ("-I", str(ROOT / "simulated_gpu" / "include"))
    return compile_c(tmp_path_factory.mktemp("sweep") / "sweep", PROGRAM, built.sim_dir / "libcuda.so.1", flags=include)


def serve(coordinator: ScriptedCoordinator, process: subprocess.Popen[str]) -> None:
    """Grants what is asked for until the program has ended."""
    lease = 0
    while process.poll() is None:
        match coordinator.receive(0.05):
            case messages.Hello():
                coordinator.send(messages.Welcome(1))
            case messages.AttachGpu(wanted=wanted):
                coordinator.settings(limit=1 << 30)
                if wanted:
                    coordinator.grant(lease := lease + 1)
            case messages.Request() | messages.Release(wanted=True):
                coordinator.grant(lease := lease + 1)
            case _:
                pass


def sweep(coordinator: ScriptedCoordinator, environment: dict[str, str], *words: str | Path) -> list[str]:
    """Output of the sweep without its last line, which is `good` or, for `host-first`, `unused`."""
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    watch = threading.Timer(BOUND_S, os.kill, (process.pid, signal.SIGABRT))
    watch.start()
    try:
        reader = threading.Thread(target=serve, args=(coordinator, process))
        reader.start()
        output, errors = process.communicate()
        reader.join()
    finally:
        watch.cancel()
        process.kill()
    assert not any(complaint in errors for complaint in COMPLAINTS), errors[-8000:]
    assert process.returncode == 0, (output[-4000:], errors[-4000:])
    return output.splitlines()


@pytest.mark.parametrize("mode", MODES)
def test_each_call_of_the_driver_is_out_of_memory(
    coordinator: ScriptedCoordinator, hook_env: dict[str, str], program: Path, mode: str
) -> None:
    """What the hook tries again when memory is short would be charged twice, or never end."""
    said = sweep(coordinator, {**hook_env, "NVSHARE_MEMORY": mode}, program, "driver", "2")
    assert said[1:] == ["good"]
    assert int(said[0].split()[2]) > 120


def test_each_first_allocation_of_the_hook_fails(hook_env: dict[str, str], program: Path, tmp_path: Path) -> None:
    """What is made once, when CUDA is used for the first time, would be missing for ever, and a call hang or crash.

    In mode `swap`, which makes all that the others make.
    """
    number, said = 0, ["good"]
    while said == ["good"]:
        number += 1
        state = {"NVSHARE_SIM_STATE": str(tmp_path / f"sim{number}"), "NVSHARE_LOG": "off", "NVSHARE_MEMORY": "swap"}
        with ScriptedCoordinator(tmp_path / "hooks.sock") as fresh:
            said = sweep(fresh, hook_env | state, program, "host-first", str(number))
    assert said == ["unused"]
    assert number > 15


@pytest.mark.sanitizer
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_each_call_fails(coordinator: ScriptedCoordinator, hook_env: dict[str, str], program: Path, mode: str) -> None:
    """A program would hear another error than the driver's, be charged for ever with what it does not have, or crash
    on a machine that is short of memory; freed memory would be in use, or a lock held by nobody."""
    variables = sanitized("address,undefined")
    preload = f"{variables.pop('LD_PRELOAD')} {variables['NVSHARE_HOOK_LIBRARY']}"
    libraries = {"LD_PRELOAD": preload, "LD_LIBRARY_PATH": variables["NVSHARE_SIM_LIBRARY_DIR"]}
    environment = {**hook_env, **variables, **libraries, "NVSHARE_MEMORY": mode}
    for words, scenes in ((("driver", "719"), 120), (("host",), 20)):
        said = sweep(coordinator, environment, program, *words)
        assert said[1:] == ["good"]
        assert int(said[0].split()[2]) > scenes
