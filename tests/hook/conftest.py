"""Fixtures of the hook's tests: a scripted coordinator, and a CUDA program under the hook that does what it is told."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.hook.compiled import PROGRAMS, SOURCE, compile_c
from tests.hook.interception_programs import programs as programs
from tests.hook.memory_library import Memory, compile_library
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator

StartClient = Callable[..., ScriptedClient]


SANITIZE = os.environ.get("NVSHARE_TEST_SANITIZE", "")
"""`thread` or `address,undefined`: the agent's tests run a program that is instrumented whole, without interception."""

_numbers = itertools.count()
STANDALONE = (
    *("base/clock", "base/config", "base/hot", "base/log"),
    *("base/process/fork", "base/process/futex", "base/process/thread"),
    *("gate/gate", "gate/start", "gate/wait", "contexts/dead", "ipc/socket"),
    *("inflight/cost", "inflight/drain", "inflight/marks", "inflight/pacing", "inflight/stream"),
    *("coord/protocol/lease_machine", "coord/protocol/link", "coord/protocol/transport"),
    *("coord/agent", "coord/host", "coord/lease", "coord/loop", "coord/mailbox", "coord/messages", "coord/moves"),
    *("coord/report", "hooks/public"),
)


@pytest.fixture(scope="session")
def client_program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """tests/hook/c/agent_client.c, linked with the simulated driver."""
    out = tmp_path_factory.mktemp("agent") / "client"
    sources = [PROGRAMS / "agent_client.c"]
    flags: tuple[str, ...] = ()
    if SANITIZE:
        sources += [PROGRAMS / "agent_standalone.c", *(SOURCE / f"{name}.c" for name in STANDALONE)]
        flags = (f"-fsanitize={SANITIZE}", "-Wno-tsan", "-rdynamic")
    return compile_c(out, *sources, built.sim_dir / "libcuda.so.1", flags=flags)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's: a path so short that a socket's fits into it, whatever the test is called."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as made:
        yield Path(made)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[ScriptedCoordinator]:
    """Listens on hooks.sock."""
    with ScriptedCoordinator(tmp_path / "hooks.sock") as scripted:
        yield scripted


@pytest.fixture
def hook_env(sim_env: dict[str, str], built: Built, tmp_path: Path) -> dict[str, str]:
    """Environment of a program under the hook on a simulated GPU."""
    preload = {} if SANITIZE else {"LD_PRELOAD": str(built.hook)}
    return {
        **sim_env,
        **preload,
        "NVSHARE_SOCKET": str(tmp_path / "hooks.sock"),
        "NVSHARE_MEMORY": "device",
        "NVSHARE_NAME": "scripted",
    }


@pytest.fixture
def start(client_program: Path, hook_env: dict[str, str]) -> Iterator[StartClient]:
    """Starts a client; keyword arguments change its environment, None removes a variable."""
    with ExitStack() as stack:

        def run(**changes: str | None) -> ScriptedClient:
            environment = {k: v for k, v in (hook_env | changes).items() if v is not None}
            return stack.enter_context(ScriptedClient(client_program, environment))

        yield run


@pytest.fixture
def client(start: StartClient) -> ScriptedClient:
    """One client with the usual environment."""
    return start()


@pytest.fixture(scope="session")
def memory_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once."""
    return compile_library(tmp_path_factory.mktemp("memory") / "memory.so")


@pytest.fixture
def fresh(memory_library: Path, tmp_path: Path) -> Callable[[int], Memory]:
    """Makes memory sides that share no state: the loader sees a different file each time."""

    def make(mode: int) -> Memory:
        copy = tmp_path / f"memory{next(_numbers)}.so"
        shutil.copy(memory_library, copy)
        return Memory(copy, mode)

    return make
