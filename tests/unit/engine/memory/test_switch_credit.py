"""Switches of memory take at most a fifth of the time, whatever the policy and the operator ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from nvshare.coordinator.engine.memory import switch_credit
from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Log
from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import Allotment, GpuView, JobView, Plan, PolicyBase
from tests.harness import Harness, ScriptedClient, one_gpu

CAPACITY, RATE = 8000, 40
"""Capacity, and what moves in each direction in a millisecond: all of it takes 200 ms."""
USEFUL = 0.78
"""Four fifths, less the hand-overs, whose messages take a millisecond each here."""


@dataclass
class Program:
    """A program whose memory moves at `RATE`.  It works, then thinks; `think_ms` 0: it always wants the GPU."""

    client: ScriptedClient
    allocated: int
    resident: int
    work_ms: int = 0
    think_ms: int = 0
    worked_ms: int = 0
    since_ms: int = 0
    open: bool = False
    moves: bool = False

    def report(self) -> None:
        self.client.report(allocated=self.allocated, resident=self.resident, host=self.allocated - self.resident)

    def hear(self) -> None:
        """Takes its messages in their order."""
        inbox, self.client.inbox = self.client.inbox, []
        for message in inbox:
            if isinstance(message, messages.Target):
                self.moves = True
            elif isinstance(message, messages.Grant):
                self.open = True
                if self.moves:
                    self.moves = False
                    self.client.comes_to(self.resident)
            elif isinstance(message, messages.Revoke):
                self.open = False
                self.client.release(message.lease_id, wanted=True)

    def millisecond(self) -> None:
        """Moves, works, or asks."""
        if self.moves:
            goal = self.client.targets[0].bytes
            self.resident += max(-RATE, min(RATE, goal - self.resident))
            self.moves = self.resident != goal
            self.client.comes_to(self.resident, at_rest=not self.moves)
        if self.open:
            self.worked_ms += 1
            self.since_ms += 1
            if self.think_ms and self.since_ms >= self.work_ms:
                self.open, self.since_ms = False, -self.think_ms
                self.client.release(idle=True)
        elif self.since_ms < 0:
            self.since_ms += 1
            if self.since_ms == 0:
                self.client.request()


def start(programs: list[Program]) -> None:
    for program in programs:
        program.report()
    for program in programs:
        program.client.request()


def run(harness: Harness, programs: list[Program], milliseconds: int) -> float:
    """Returns the share of the time in which a program worked."""
    before = sum(program.worked_ms for program in programs)
    for _ in range(milliseconds):
        for program in programs:
            program.hear()
        for program in programs:
            program.millisecond()
        harness.milliseconds(1)
    return (sum(program.worked_ms for program in programs) - before) / milliseconds


def make(policy: str, quantum_ms: int | None) -> Harness:
    quantum_ns = None if quantum_ms is None else quantum_ms * MILLISECOND_NS
    return one_gpu(CAPACITY, policy=policy, quantum_ns=quantum_ns, check_invariants=False)


@pytest.mark.parametrize(("think_ms", "quantum_ms"), [(100, 100), (300, None)])
def test_priorities_with_memory_short_do_not_livelock(think_ms: int, quantum_ms: int | None) -> None:
    """Broken: a program of high priority that comes again and again has the card's memory moved all the time, and
    programs of lower priority are revoked before they have worked."""
    harness = make("priority", quantum_ms)
    programs = [
        Program(harness.client(mode=MemoryMode.SWAP, priority=9), 5000, 5000, work_ms=20, think_ms=think_ms),
        Program(harness.client(mode=MemoryMode.SWAP, priority=5), 5000, 3000, work_ms=50, think_ms=3 * think_ms),
        Program(harness.client(mode=MemoryMode.SWAP), 5000, 0),
    ]
    start(programs)
    run(harness, programs, 10_000)  # uses up the reserve for bursts
    assert run(harness, programs, 20_000) >= USEFUL
    assert all(program.worked_ms for program in programs)


def test_turns_of_two_large_programs_are_lengthened_and_the_log_says_so_once() -> None:
    """Broken: with a fixed quantum of 20 ms two programs of 90 % of the memory do nothing but move it."""
    harness = make("round_robin", 20)
    size = CAPACITY * 9 // 10
    programs = [
        Program(harness.client(mode=MemoryMode.SWAP), size, size),
        Program(harness.client(mode=MemoryMode.SWAP), size, 0),
    ]
    start(programs)
    run(harness, programs, 10_000)  # uses up the reserve for bursts
    assert run(harness, programs, 20_000) >= USEFUL
    assert min(program.worked_ms for program in programs) >= 5_000
    told = [command for command in harness.commands if isinstance(command, Log) and "lengthened" in command.text]
    assert len(told) == 1


class _Newest(PolicyBase):
    """The first two run together; who comes later runs alone."""

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """The newest, with those that came first."""
        newest = max(job.client for job in jobs)
        together = [job.client for job in jobs if job.client <= 2] if newest <= 2 else [newest]
        return Plan(tuple(Allotment(client) for client in together), why="the newest")


def test_moves_beside_work_are_no_cost() -> None:
    """Broken: a server whose memory comes in beside a job that works uses up the time that switches may cost, and then
    waits for seconds; or batch jobs use up what is kept for those for which somebody waits."""
    harness = make("auto", 1000)
    harness.handle(events.Set("sharing", "auto"))
    gpu = harness.scheduler._node.gpus["GPU-0"]
    works = Program(harness.client(mode=MemoryMode.SWAP), 4000, 4000)
    idle = Program(harness.client(mode=MemoryMode.SWAP), 4000, 4000)
    comes = Program(harness.client(mode=MemoryMode.SWAP), 4000, 0)
    for program in (works, idle, comes):
        program.report()
    works.client.request()
    run(harness, [works, idle, comes], 100)
    comes.client.request()
    run(harness, [works, idle, comes], 300)
    assert comes.worked_ms
    assert works.worked_ms >= 390
    assert gpu.switching.credit.credit_ns == switch_credit.MOST_NS
    gpu.switching.credit.credit_ns = switch_credit.MOST_NS / 4
    assert switch_credit.lacking_ns(gpu, harness.clock.now_ns) > 0
    assert switch_credit.lacking_ns(gpu, harness.clock.now_ns, urgent=True) == 0


def test_exclusive_turns_begin_although_switches_are_held_back() -> None:
    """Broken: programs that ran side by side go on so after the operator asked for exclusive turns."""
    harness = Harness(lambda name, uuid: _Newest(), sharing=Sharing.AUTO)
    harness.gpu(capacity=100)
    for _ in range(2):
        harness.client(wanted=True, mode=MemoryMode.SWAP).report(allocated=40, resident=40)
    late = harness.client(mode=MemoryMode.SWAP, resident=0, host=60)
    gpu = harness.scheduler._node.gpus["GPU-0"]
    gpu.switching.credit.credit_ns = -1e9
    late.request()
    assert gpu.schedule.held_back
    assert len(gpu.leases.running) == 2
    harness.handle(events.Set("sharing", "exclusive"))
    assert len(gpu.leases.running) == 1
