"""Fixtures that every test may use: the C parts, built once from this checkout, and simulated GPUs of one's own.

Invariants: the libraries under test are those of this checkout, never those of an installed wheel; a build runs once at
a time (file lock), so that xdist's workers share it; nothing outlives the test that made it.

Non-goals: fixtures of one folder's tests; those have a conftest of their own.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile(
    "steady", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")  # a slow machine is no failure

signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it, and programs inherit that

sys.dont_write_bytecode = False  # else each program that a test starts compiles all its modules again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # jsonschema needs seconds to load it, for one format

logging.raiseExceptions = False  # a command's handler keeps the stream of its test, which is closed when others log

PURE = ("unit", "policies", "simulation", "chart", "kubernetes/cluster")
"""Tests that need no compiled library, so that they start at once."""


@dataclass(frozen=True, slots=True)
class Built:
    """Paths of the compiled parts of this checkout."""

    hook: Path
    """libnvshare_hook.so"""
    sim_dir: Path
    """directory of the doubles of libcuda.so.1 and libnvidia-ml.so.1"""
    build_dir: Path
    """CMake's build tree"""


def build_tool(name: str) -> str:
    """cmake or ninja: of this Python's environment if it has one, else of the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: install the test extra, pip install '.[test]'")
    return found


@functools.cache
def build(build_dir: Path, *options: str) -> Path:
    """Configures, builds and installs the C parts below `build_dir`; returns the prefix, laid out as the wheel is.

    Incremental, once a process, safe to call from several processes at once.
    """
    build_dir.parent.mkdir(parents=True, exist_ok=True)
    prefix = build_dir / "install"
    with build_dir.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        environment.pop("LD_PRELOAD", None)
        cmake = build_tool("cmake")
        tools = (f"-DCMAKE_MAKE_PROGRAM={build_tool('ninja')}", f"-DPython3_EXECUTABLE={sys.executable}")
        steps = (
            [cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *tools, *options],
            [cmake, "--build", str(build_dir), "--parallel", "2"],
            [cmake, "--install", str(build_dir), "--prefix", str(prefix)],
        )
        for step in steps:
            done = subprocess.run(step, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.fail(f"{' '.join(step)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}", pytrace=False)
    return prefix


@pytest.fixture(scope="session")
def built() -> Built:
    """The C parts of this checkout, warnings being errors; also told to every program that the tests start.

    NVSHARE_TEST_BUILD names a build tree to use instead of build/test.
    """
    build_dir = Path(os.environ.get("NVSHARE_TEST_BUILD") or ROOT / "build" / "test").absolute()
    prefix = build(build_dir, "-DNVSHARE_WERROR=ON")
    made = Built(
        hook=prefix / "nvshare" / "client_hook" / "lib" / "libnvshare_hook.so",
        sim_dir=prefix / "nvshare" / "simulated_gpu" / "lib",
        build_dir=build_dir,
    )
    os.environ["NVSHARE_HOOK_LIBRARY"] = str(made.hook)
    os.environ["NVSHARE_SIM_LIBRARY_DIR"] = str(made.sim_dir)
    return made


@pytest.fixture(scope="session")
def saturate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C program that keeps a GPU busy: SECONDS KERNEL_NS DEPTH."""
    program = tmp_path_factory.mktemp("programs") / "saturate"
    source = str(ROOT / "bench" / "programs" / "saturate.c")
    subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-o", str(program), source, "-ldl"], check=True)
    return program


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than processors, because many tests wait for other processes.

    No workers for one file, whose tests start sooner without them, and with `-s`, which workers ignore.
    """
    one_file = len(config.args) == 1 and Path(config.args[0].partition("::")[0]).is_file()
    return 0 if one_file or config.option.capture == "no" else len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a card are skipped where there is none."""
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(autouse=True)
def _one_at_a_time_on_the_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests on a card share it with each other only by what they start themselves, also under pytest-xdist."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"nvshare-card-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def _own_libraries(request: pytest.FixtureRequest) -> None:
    """Every test in a folder that is not pure Python runs with the libraries of this checkout."""
    tests = ROOT / "tests"
    if request.path.parent != tests and not any(request.path.is_relative_to(tests / pure) for pure in PURE):
        request.getfixturevalue("built")


@pytest.fixture
def sim_env(tmp_path: Path, built: Built) -> dict[str, str]:
    """Environment of a program that runs on simulated GPUs of this test's own (one card of 16 GiB).

    Set `NVSHARE_SIMULATE` in it before the first program starts to have other cards.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_") and k != "LD_PRELOAD"}
    before = environment.get("LD_LIBRARY_PATH")
    environment |= {
        "LD_LIBRARY_PATH": str(built.sim_dir) + (os.pathsep + before if before else ""),
        "NVSHARE_SIM_STATE": str(tmp_path / "simulated_gpu"),
        "NVSHARE_SIM_LIBRARY_DIR": str(built.sim_dir),
        "NVSHARE_HOOK_LIBRARY": str(built.hook),
        "NVSHARE_RUNTIME_DIR": str(tmp_path / "run"),
    }
    return environment
