"""Reports of a program's progress by the hook, to a scripted coordinator."""

from __future__ import annotations

from nvshare.coordinator.protocol import messages
from tests.hook.coord.test_agent import MS, hold
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator


def test_reports_while_work_goes_on(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: the coordinator does not learn how fast a program runs, or counts and times do not grow."""
    hold(coordinator, client, report=True)
    first = coordinator.expect(messages.Progress)
    assert client.do("launch 1000") == "launched"
    second = coordinator.expect(messages.Progress)
    assert [(m.gpu, m.lease_id, m.work, m.steps) for m in (first, second)] == [(0, 7, 1, 0), (0, 7, 2, 0)]
    assert client.do("step") == "stepped"
    assert coordinator.expect(messages.Progress).steps == 1
    assert 0 < first.at_ns < second.at_ns
    assert (second.busy_ns, second.watched_ns) == (0, 0)


def test_last_count_comes_before_the_release(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: work between the last report and the end of a lease counts for the next lease."""
    hold(coordinator, client, report=True)
    assert coordinator.revoke(7).submissions == 1
    counts = [m for m in coordinator.received if isinstance(m, messages.Progress)]
    assert [(m.lease_id, m.work) for m in counts] == [(7, 1)]
    client.tell("launch 1000")
    coordinator.expect(messages.Request)
    coordinator.grant(8)
    assert client.answer() == "launched"
    assert coordinator.expect(messages.Progress).lease_id == 8
    coordinator.received.clear()
    coordinator.revoke(8)  # nothing has changed since
    coordinator.nothing(messages.Progress)


def test_no_reports_unasked(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: an older coordinator hears messages that it does not know, or `report` cannot be taken back."""
    client.tell("launch 1000")
    coordinator.welcome()
    coordinator.asked()
    for report in (True, False):
        coordinator.settings(report=report)
    coordinator.grant(7)
    assert client.answer() == "launched"
    coordinator.revoke(7)
    coordinator.nothing(messages.Progress)


def watched(coordinator: ScriptedCoordinator, earlier: messages.Progress) -> float:
    """The busy part of the time since an earlier report, once enough samples have been taken."""
    while (report := coordinator.expect(messages.Progress)).watched_ns - earlier.watched_ns < 50 * MS:
        pass
    return (report.busy_ns - earlier.busy_ns) / (report.watched_ns - earlier.watched_ns)


def test_watches_while_asked(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a program that keeps the GPU busy looks like one that does not, or the other way round."""
    hold(coordinator, client, report=True, watch=True)
    coordinator.expect(messages.Progress)
    assert client.do("block") == "blocked"
    blocked = coordinator.expect(messages.Progress)  # in part from before
    assert watched(coordinator, blocked) == 1.0
    assert client.do("unblock") == "unblocked"
    assert client.do("sync") == "synchronised"
    assert client.do("launch 1000") == "launched"
    later = ended = coordinator.expect(messages.Progress)
    while later.watched_ns - ended.watched_ns < 50 * MS:
        assert client.do("launch 1000") == "launched"
        later = coordinator.expect(messages.Progress)
    assert later.busy_ns - ended.busy_ns < later.watched_ns - ended.watched_ns


def test_captures_are_watched_around(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a sample invalidates a capture."""
    hold(coordinator, client, report=True, watch=True)
    for _ in range(20):
        assert client.do("captured 500 1000") == "captured 0"
    assert coordinator.expect(messages.Progress).work > 0
