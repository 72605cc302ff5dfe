"""Graphs whose work is on two GPUs: a launch waits for the leases of both, however the graph was made.

Non-goals: the memory that such graphs reach (test_swap_peers.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from nvshare.simulated_gpu.trace import read_trace
from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.scripted import NEVER_NS, ScriptedClient, ScriptedCoordinator

PROGRAM = Path(__file__).parent / "programs" / "graph_gpus.c"
KINDS = ("captured", "kernel", "old_kernel", "context", "fill", "general", "elsewhere")
MEANWHILE = {"nothing": (), "a capture": ("capture", "end capture"), "its context ends": ("reset",)}
"""Commands to the program after such a launch, and after the drain."""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """Linked by the name that both drivers have."""
    return compile_c(tmp_path_factory.mktemp("graphs") / "graph_gpus", PROGRAM, built.sim_dir / "libcuda.so.1")


class TwoGpus:
    """The program, and a coordinator that gives it what it asks for while it prepares."""

    def __init__(self, client: ScriptedClient, coordinator: ScriptedCoordinator) -> None:
        self.client = client
        self.coordinator = coordinator
        self.leases = {0: 0, 1: 0}

    def grant(self, gpu: int) -> None:
        """For a long time."""
        self.leases[gpu] += 1
        self.coordinator.grant(self.leases[gpu], gpu=gpu)

    def revoke(self, gpu: int) -> None:
        """Returns when it is given back."""
        self.coordinator.revoke(self.leases[gpu], gpu=gpu)

    def requested(self) -> int:
        """The GPU whose lease it asks for next."""
        return self.coordinator.expect(messages.Request).gpu

    def _serve(self) -> None:
        match self.coordinator.receive(0.0):
            case messages.Hello():
                self.coordinator.send(messages.Welcome(1))
            case messages.AttachGpu(gpu=gpu, wanted=wanted):
                self.coordinator.settings(gpu=gpu, capacity_bytes=1 << 30)
                if wanted:
                    self.grant(gpu)
            case messages.Request(gpu=gpu):
                self.grant(gpu)

    def do(self, line: str) -> None:
        """With every lease that it takes."""
        self.client.tell(line)
        while not (said := self.client.answer(0.01)):
            assert self.client.process.poll() is None, f"{line}: the program has ended"
            self._serve()
        assert said == "0", f"{line}: CUresult {said}"

    def take_leases(self) -> None:
        """Both are somebody else's now; where the GPUs are linked, the one follows the other."""
        for gpu, lease in self.leases.items():
            self.coordinator.send(messages.Revoke(gpu=gpu, lease_id=lease, drain_deadline_ns=NEVER_NS))
        assert {self.coordinator.expect(messages.Release).gpu for _ in self.leases} == set(self.leases)
        self.coordinator.received.clear()


@contextmanager
def at_work(program: Path, environment: Mapping[str, str], coordinator: ScriptedCoordinator) -> Iterator[TwoGpus]:
    """The program, which has used both GPUs."""
    with ScriptedClient(program, environment) as client:
        made = TwoGpus(client, coordinator)
        made.do("begin")  # which asks for the lease of each
        yield made


def launch_waits_for_both(two: TwoGpus, kind: str) -> None:
    """A graph of this kind, with both leases gone."""
    two.do(f"build {kind}")
    two.take_leases()
    two.client.tell("launch")
    assert {two.requested(), two.requested()} == {0, 1}
    for gpu in (0, 1):
        assert two.client.answer(0.0) == ""
        two.grant(gpu)
    assert two.client.answer() == "0"
    two.do("wait")


def drain_after_a_launch(two: TwoGpus, kind: str, long_ns: int, meanwhile: Sequence[str]) -> None:
    """GPU 0's, when a graph that was launched on GPU 1 computes there.  Returns when its lease has been given back."""
    two.do(f"last {long_ns}")
    two.do(f"build {kind}")
    two.do("launch")
    for line in meanwhile[:1]:
        two.client.tell(line)
    two.revoke(0)
    for line in meanwhile[1:]:
        two.client.tell(line)
    assert [two.client.answer() for _ in meanwhile] == ["0"] * len(meanwhile)


@pytest.fixture
def two(program: Path, hook_env: dict[str, str], coordinator: ScriptedCoordinator) -> Iterator[TwoGpus]:
    """On simulated GPUs."""
    with at_work(program, hook_env | {"NVSHARE_SIMULATE": "2x512MiB"}, coordinator) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_waits_for_both_leases(two: TwoGpus, kind: str) -> None:
    """Broken: a graph of this kind computes on a GPU that another program has."""
    launch_waits_for_both(two, kind)


@pytest.mark.parametrize("kind", ["one", "one_captured"])
def test_a_graph_on_one_gpu_waits_for_that_one(two: TwoGpus, kind: str) -> None:
    """Broken: a program with two GPUs never computes on one while the other is somebody else's."""
    two.do(f"build {kind}")
    two.take_leases()
    two.client.tell("launch")
    assert two.requested() == 1
    two.grant(1)
    assert two.client.answer() == "0"
    two.do("wait")
    assert [message.gpu for message in two.coordinator.received if isinstance(message, messages.Request)] == [1]


def test_a_lease_that_is_lost_meanwhile_is_asked_for_again(two: TwoGpus) -> None:
    """Broken: of two GPUs whose turns come at different times the first is gone when the second is there."""
    two.do("build kernel")
    two.take_leases()
    two.client.tell("launch")
    assert {two.requested(), two.requested()} == {0, 1}
    two.grant(0)
    assert two.coordinator.revoke(two.leases[0], gpu=0).wanted
    two.grant(1)
    assert two.client.answer(0.0) == ""
    two.grant(0)
    assert two.client.answer() == "0"
    two.do("wait")


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("kind", ["captured", "kernel"])
def test_a_drain_waits_for_its_gpus_part(two: TwoGpus, kind: str, meanwhile: str, hook_env: dict[str, str]) -> None:
    """Broken: a lease is given back while a graph that was launched on another GPU computes on this one."""
    long_ns = 100_000_000
    drain_after_a_launch(two, kind, long_ns, MEANWHILE[meanwhile])
    state = Path(hook_env["NVSHARE_SIM_STATE"])
    assert [work for work in read_trace(state) if work.gpu == 0 and work.end_ns - work.start_ns >= long_ns]


def test_memory_is_freed_after_the_graph(
    program: Path, hook_env: dict[str, str], coordinator: ScriptedCoordinator
) -> None:
    """Broken: in mode `swap` the hook takes memory away under a graph that was launched on another GPU's stream."""
    environment = hook_env | {"NVSHARE_SIMULATE": "2x512MiB", "NVSHARE_MEMORY": "swap"}
    with at_work(program, environment, coordinator) as two:
        two.do("last 200000000")
        two.do("build kernel")
        two.do("launch")
        two.do("free")
        state = Path(hook_env["NVSHARE_SIM_STATE"])
        assert [work for work in read_trace(state) if work.gpu == 0 and work.end_ns - work.start_ns >= 200_000_000]


@pytest.mark.sanitizer
def test_all_kinds_under_sanitizers(
    program: Path, sanitized_env: dict[str, str], coordinator: ScriptedCoordinator
) -> None:
    """Broken: a race of launches with the agent, or a graph that is still looked up after its end."""
    with at_work(program, sanitized_env | {"NVSHARE_SIMULATE": "2x512MiB"}, coordinator) as two:
        for kind in (*KINDS, "one"):
            two.do(f"build {kind}")
            two.do("loop 100")  # more than are remembered
        launch_waits_for_both(two, "captured")
        assert two.client.finish() == (0, "")
