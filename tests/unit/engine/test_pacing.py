"""When programs are paced: while another one wants the card.

Non-goals: pacing for an interactive program (the policies' tests), what a hook makes of its budget.
"""

from __future__ import annotations

from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from tests.harness import contended

QUANTUM_MS = 100


def test_pacing_begins_with_the_second_client_and_ends_with_it() -> None:
    """Broken: a client alone would be slowed down, or a crowd would have unbounded drains."""
    harness, a = contended(1)
    assert {s.pacing_budget_ns for s in a.take(messages.GpuSettings)} == {0}
    harness.client()
    assert not a.take(messages.GpuSettings), "a program that only looked at the card is nobody to be paced for"
    b = harness.client(wanted=True)
    assert [s.pacing_budget_ns for s in a.take(messages.GpuSettings)] == [10 * MILLISECOND_NS]
    assert [s.pacing_budget_ns for s in b.take(messages.GpuSettings)][-1] == 10 * MILLISECOND_NS
    c = harness.client(wanted=True)
    assert not a.take(messages.GpuSettings), "unchanged settings are not sent again"
    c.die()
    b.die()
    assert [s.pacing_budget_ns for s in a.take(messages.GpuSettings)] == [0]


def test_a_holder_whose_turn_nobody_wanted_is_paced_as_one_that_is_alone() -> None:
    """Broken: a neighbour that only keeps its memory costs each launch of a program."""
    harness, a, b = contended()
    harness.milliseconds(QUANTUM_MS)
    a.release(wanted=True)
    b.release(idle=True)
    a.take(messages.GpuSettings)
    harness.milliseconds(QUANTUM_MS - 1)
    assert not a.take(messages.GpuSettings), "the other program may soon be back"
    harness.milliseconds(1)
    assert [s.pacing_budget_ns for s in a.take(messages.GpuSettings)] == [0]
    assert harness.timer_ns is None, "nothing is due, so nothing may poll"
    b.request()
    a.release(wanted=True)
    b.release(wanted=True)
    assert a.take(messages.Grant)[-1].waiters == 1
    assert [s.pacing_budget_ns for s in a.take(messages.GpuSettings)] == [10 * MILLISECOND_NS]
