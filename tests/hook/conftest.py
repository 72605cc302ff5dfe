"""Fixtures of the hook's tests: a scripted coordinator, and a CUDA program under the hook that does what it is told."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.end_to_end.test_sanitized import complaints, under_sanitizer
from tests.hook.compiled import compile_c
from tests.hook.interception.recording_driver import programs as programs
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator

CLIENT = Path(__file__).parent / "coord" / "programs" / "agent_client.c"
StartClient = Callable[..., ScriptedClient]


@pytest.fixture(scope="session")
def client_program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """tests/hook/coord/programs/agent_client.c, linked with the simulated driver."""
    out = tmp_path_factory.mktemp("agent") / "client"
    return compile_c(out, CLIENT, built.sim_dir / "libcuda.so.1")


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
    return {
        **sim_env,
        "LD_PRELOAD": str(built.hook),
        "NVSHARE_SOCKET": str(tmp_path / "hooks.sock"),
        "NVSHARE_MEMORY": "device",
        "NVSHARE_NAME": "scripted",
    }


@pytest.fixture(params=["address,undefined", "thread"])
def sanitized_env(request: pytest.FixtureRequest, hook_env: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """The same with hook and simulated GPU under a sanitizer, which must have nothing to complain of."""
    yield under_sanitizer(hook_env, request.param, tmp_path)
    assert complaints(tmp_path) == []


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
