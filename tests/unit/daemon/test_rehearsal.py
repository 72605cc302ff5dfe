"""The stage on which a hand-over is rehearsed: it must play what it claims, for ever, and alone."""

from __future__ import annotations

from nvshare.coordinator.daemon.rehearsal import Rehearsal


def test_each_play_is_one_hand_over() -> None:
    """Broken: the rehearsal warms something else than a hand-over, or grinds to a halt."""
    writes: list[None] = []
    rehearsal = Rehearsal(lambda: writes.append(None))
    stage = rehearsal._stage
    holders, leases = [], []
    for _ in range(500):
        rehearsal.play()
        holders.append(stage.holder)
        leases.append(stage.lease)
    assert set(holders) == {1, 2}
    assert holders[::2] == [holders[0]] * 250, "they take turns"
    assert leases == list(range(2, 502))
    assert len(writes) == 501, "the journal is written once for each grant"
