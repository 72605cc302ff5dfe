"""bench.swap runs on the simulated GPU and prints what it promises; how fast is not asked here."""

from __future__ import annotations

from tests.bench.test_benches_run import run


def test_swap() -> None:
    """Without figures nobody would notice that moving memory has become slow, or loses data."""
    told = run("bench.swap", "--simulate", "--rounds=1", "--gib=0.125", "--capacity-gib=0.25")
    assert set(told["memcpy_gib_s"]) == {"out", "in", "duplex"}
    assert min(told[name] for name in ("evict_gib_s", "restore_gib_s", "handover_gib_s", "first_evict_gib_s")) > 0
    assert told["simulated"] is True
