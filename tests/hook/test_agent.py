"""The agent thread in real programs over the simulated GPU, against a coordinator that does what the test says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import wire
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator, libzmq_path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, built: Any) -> Path:
    out = tmp_path_factory.mktemp("agent") / "client"
    include = subprocess.check_output(["python", str(ROOT / "client_hook/find_cuda_header.py")], text=True).strip()
    subprocess.run(
        [
            *("gcc", "-std=gnu11", "-O1", "-Wall", "-Wno-format-security", "-Werror", "-isystem", include),
            *("-I", str(ROOT / "client_hook/src"), str(HERE / "c/agent_client.c"), "-o", str(out)),
            *(str(built.sim_dir / "libcuda.so.1"), "-ldl", "-lpthread"),
        ],
        check=True,
    )
    return out


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(tmp_path / "hooks.sock") as scripted:
        yield scripted


@pytest.fixture
def environment(sim_env: dict[str, str], built: Any, tmp_path: Path) -> dict[str, str]:
    return {
        **sim_env,
        "LD_PRELOAD": str(built.hook),
        "NVSHARE_SOCKET": str(tmp_path / "hooks.sock"),
        "NVSHARE_LIBZMQ": libzmq_path(),
        "NVSHARE_MEMORY": "device",
        "NVSHARE_NAME": "scripted",
    }


@pytest.fixture
def client(program: Path, environment: dict[str, str]) -> Iterator[ScriptedClient]:
    with ScriptedClient(program, environment) as scripted:
        yield scripted


def test_waits_for_the_grant_and_releases_on_revoke(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: work reaches the driver without a lease, or a revoked lease is not given back."""
    client.tell("launch 1000")
    attach = coordinator.welcome()
    assert attach.wanted
    assert attach.lease_id == 0
    assert attach.uuid.startswith("GPU-")
    assert client.answer(0.2) == ""
    coordinator.grant(7)
    assert client.answer() == "launched"
    release = coordinator.revoke(7)
    assert (release.drained, release.wanted, release.reason) == (True, False, wire.ReleaseReason.REVOKED)
    assert release.submissions == 1
    client.tell("launch 1000")
    assert coordinator.expect(wire.Request).gpu == 0
    coordinator.grant(8)
    assert client.answer() == "launched"
