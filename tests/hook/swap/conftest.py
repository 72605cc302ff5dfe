"""Fixtures of a program in mode `swap`: its environment, the program, and the program with the lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hook.memory.test_memory_process import Client, start
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.swap.test_swap_process import attached, hold


@pytest.fixture
def environment(hook_env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Environment of a program under the hook."""
    return hook_env | {
        "NVSHARE_LOG_FILE": str(tmp_path / "log"), "NVSHARE_MEMORY": "swap", "NVSHARE_SIMULATE": "1x512MiB",
    }  # fmt: skip


@pytest.fixture
def client(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> Iterator[Client]:
    """A program that the coordinator knows."""
    with start(environment) as program:
        attached(program, coordinator)
        yield program


@pytest.fixture
def holder(coordinator: ScriptedCoordinator, client: Client) -> Client:
    """The same with lease 1."""
    hold(client, coordinator)
    return client
