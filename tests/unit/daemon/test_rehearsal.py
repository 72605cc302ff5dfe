"""The cache warm-up: every run must be one whole handover."""

from __future__ import annotations

from nvshare.coordinator.daemon.rehearsal import Rehearsal


def test_each_run_is_one_handover() -> None:
    """Broken: the rehearsal warms other code than a handover, or stops."""
    writes: list[None] = []
    rehearsal = Rehearsal(lambda: writes.append(None))
    recorder = rehearsal._recorder
    holders, leases = [], []
    for _ in range(500):
        rehearsal.run()
        holders.append(recorder.holder)
        leases.append(recorder.lease)
    assert set(holders) == {1, 2}
    assert holders[::2] == [holders[0]] * 250, "they take turns"
    assert leases == list(range(2, 502))
    assert len(writes) == 501, "the journal is written once for each grant"
