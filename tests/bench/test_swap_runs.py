"""nvshare.bench.memory.swap runs on the simulated GPU and prints what it promises; how fast is not asked here."""

from __future__ import annotations

from tests.bench.test_benches_run import run


def test_swap() -> None:
    """Without figures nobody would notice that moving memory has become slow, or loses data."""
    told = run("nvshare.bench.memory.swap", "--simulate", "--rounds=1", "--gib=0.0625", "--capacity-gib=0.125")
    assert set(told["memcpy_gib_s"]) == {"out", "in"}
    assert min(told[name] for name in ("evict_gib_s", "restore_gib_s", "handover_gib_s", "first_evict_gib_s")) > 0
    assert min(told["first_evict_prepared_gib_s"], told["memcpy_two_programs_gib_s"]) > 0
    assert told["simulated"] is True


def test_checked() -> None:
    """The comparison of data over many rounds is the proof that moving loses nothing."""
    told = run("nvshare.bench.memory.swap", "--simulate", "--checked=5", "--seed=3")
    assert (told["rounds"], told["mismatches"], told["seed"]) == (5, 0, 3)
    assert told["moved_gib"] > 0
