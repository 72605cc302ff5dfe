"""Figures of pools: the same program with the hook and without it.

Where there is a card, over that too.  No program has more than 192 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.hook.memory.test_memory_process import (
    MIB,
    MODES,
    OUT_OF_MEMORY,
    Client,
    attached,
    environment,
    simulated,
    start,
)
from tests.hook.scripted import ScriptedCoordinator

__all__ = ["environment", "simulated"]  # fixtures

UNBOUNDED = 2**64 - 1
THRESHOLD, RESERVED_HIGH, USED_HIGH = 4, 6, 8
STEPS = [
    "figures",
    "alloc a 1000",
    f"alloc b {20 * MIB}",
    f"alloc c {40 * MIB + 512}",
    "free b",
    "sync",
    f"alloc b {10 * MIB}",
    "sync",
    f"set {USED_HIGH} 5",
    f"set {USED_HIGH} 0",
    f"set {RESERVED_HIGH} 0",
    "free c",
    "figures",
    "sync",
    "trim 0",
    "now b",
    "free a",
    "sync",
    "trim 0",
    f"alloc a {100 * MIB}",
    "free a",
    "sync",
    f"trim {50 * MIB}",
    f"set {THRESHOLD} 0",
    "sync",
]


def told(client: Client, pool: int, steps: Iterable[str], by_name: bool = True) -> list[object]:
    """Answers to each step, each with the pool's figures."""
    pointers: dict[str, int] = {}
    seen: list[object] = []
    for step in steps:
        name, *rest = step.split()
        result: object = 0
        if name == "alloc":
            command = ("pool_alloc", pool) if by_name else ("pool_alloc_current",)
            result, pointers[rest[0]] = client.ask(*command, rest[1])
        elif name == "free":
            result = client.ask("pool_free", pointers[rest[0]])
        elif name == "now":
            result = client.ask("free", pointers[rest[0]])
        elif name == "sync":
            result = client.ask("synchronize_all")
        elif name == "set":
            result = client.ask("pool_set", pool, *rest)
        elif name == "trim":
            result = client.ask("pool_trim", pool, *rest)
        seen.append((step, result, client.ask("pool_figures", pool)))
    return seen


def without(environment: dict[str, str]) -> dict[str, str]:
    """The hook."""
    return {name: value for name, value in environment.items() if name not in ("LD_PRELOAD", "NVSHARE_SOCKET")}


def ready(client: Client, coordinator: ScriptedCoordinator | None, threshold: int, kind: str) -> int:
    """The pool that is asked."""
    if coordinator is None:
        assert client.ask("start") == 0
    else:
        attached(client, coordinator)
        coordinator.grant(1)
    result, pool = client.ask("pool_default" if kind == "default" else "pool_make")
    assert result == 0
    if kind == "current":
        assert client.ask("pool_use", pool) == 0
    assert client.ask("pool_set", pool, THRESHOLD, threshold) == 0
    return int(pool)


@pytest.mark.parametrize(
    ("mode", "kind", "threshold"),
    [
        *(("swap", kind, threshold) for kind in ("default", "made", "current") for threshold in (0, UNBOUNDED)),
        *(("managed", "default", UNBOUNDED), ("managed", "made", 0)),
        *(("device", "default", 0), ("device", "current", UNBOUNDED)),
    ],
)
def test_pools_say_what_they_say_without_the_hook(
    coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str, kind: str, threshold: int
) -> None:
    """Broken: a framework's own figures say that it has no memory, or its high marks never go down."""
    by_name = kind == "made"
    with start(without(environment)) as client:
        wanted = told(client, ready(client, None, threshold, kind), STEPS, by_name)
    with start({**environment, "NVSHARE_MEMORY": mode}) as client:
        assert told(client, ready(client, coordinator, threshold, kind), STEPS, by_name) == wanted


@MODES
def test_a_pool_that_is_destroyed_takes_its_figures_along(
    coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str
) -> None:
    """Broken: a pool that gets the handle of one that has gone shows that one's figures, or memory that outlives its
    pool is taken off a stranger's."""
    with start({**environment, "NVSHARE_MEMORY": mode}) as client:
        first = ready(client, coordinator, 0, "made")
        left = [client.ask("pool_alloc", first, 4 * MIB)[1] for _ in range(2)]
        assert client.ask("pool_destroy", first) == 0
        for _ in range(8):
            result, pool = client.ask("pool_make")
            assert (result, client.ask("pool_figures", pool)) == (0, [0, 0, 0, 0])
            assert client.ask("pool_destroy", pool) == 0
        result, pool = client.ask("pool_make")
        assert client.ask("pool_free", left[0]) == client.ask("free", left[1]) == result == 0
        assert client.ask("synchronize_all") == 0
        assert client.ask("pool_figures", pool) == [0, 0, 0, 0]


@MODES
def test_a_context_takes_its_pools_memory_with_it(
    coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str
) -> None:
    """Broken: after cudaDeviceReset a pool says that memory is used which is gone.  A card's own pools outlive a reset,
    with their memory; the simulated GPU's do not."""
    kept = (4 * MIB, 32 * MIB) if mode == "device" and "NVSHARE_SIM_STATE" not in environment else (0, 0)
    with start({**environment, "NVSHARE_MEMORY": mode}) as client:
        pool = ready(client, coordinator, 0, "default")
        assert client.ask("pool_alloc", pool, 4 * MIB)[0] == 0
        assert client.ask("reset") == client.ask("synchronize_all") == 0
        used, _, reserved, _ = client.ask("pool_figures", client.ask("pool_default")[1])
        assert (used, reserved) == kept


def test_memory_that_pools_keep_is_charged(environment: dict[str, str]) -> None:
    """Broken: a program holds pools full of freed memory beside its limit, is charged twice for memory that a pool
    reuses, or cannot have what its other pools keep."""
    limited = {**environment, "NVSHARE_MEMORY": "device", "NVSHARE_MEMORY_LIMIT": "128MiB"}
    with start(limited) as client:
        assert client.ask("start") == 0
        one, other = (client.ask("pool_make")[1] for _ in range(2))
        assert [client.ask("pool_set", pool, THRESHOLD, UNBOUNDED) for pool in (one, other)] == [0, 0]
        for _ in range(3):
            result, pointer = client.ask("pool_alloc", one, 60 * MIB)
            assert (result, client.ask("info")[1]) == (0, 64 * MIB)
            assert client.ask("pool_free", pointer) == client.ask("synchronize_all") == 0
            assert client.ask("info")[1] == 64 * MIB
        result, pointer = client.ask("pool_alloc", other, 90 * MIB)
        assert (result, client.ask("info")[1]) == (0, 32 * MIB)
        assert client.ask("pool_alloc", one, 33 * MIB)[0] == OUT_OF_MEMORY
        assert client.ask("pool_free", pointer) == client.ask("synchronize_all") == 0
        assert client.ask("pool_trim", other, 0) == 0
        assert client.ask("info")[1] == 128 * MIB
        result, pointer = client.ask("pool_alloc", one, 60 * MIB)
        assert client.ask("pool_free", pointer) == client.ask("pool_set", one, THRESHOLD, 0) == 0
        assert client.ask("synchronize_all") == 0
        assert client.ask("info")[1] == 128 * MIB
        assert client.ask("alloc", 128 * MIB)[0] == 0


def test_pools_of_ones_own_are_charged_with_their_pieces(environment: dict[str, str]) -> None:
    """Broken: a program's many small pools take far more of the card than its limit, and the figures say free."""
    limited = {**environment, "NVSHARE_MEMORY": "device", "NVSHARE_MEMORY_LIMIT": "128MiB"}
    with start(limited) as client:
        assert client.ask("start") == 0
        pools = [client.ask("pool_make")[1] for _ in range(5)]
        pointers = []
        for number, pool in enumerate(pools[:4]):
            result, pointer = client.ask("pool_alloc", pool, MIB // 4)
            assert (result, client.ask("info")[1]) == (0, (96 - 32 * number) * MIB)
            pointers.append(pointer)
        assert client.ask("pool_alloc", pools[4], MIB // 4)[0] == OUT_OF_MEMORY
        assert [client.ask("pool_free", pointer) for pointer in pointers] == [0] * 4
        assert client.ask("synchronize_all") == 0
        assert client.ask("info")[1] == 128 * MIB
