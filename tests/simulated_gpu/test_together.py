"""Several programs on one simulated GPU: time slices, and the multiprocessors among clients of MPS.

Assertions are on the trace and on the count of context switches.  Most hold however late a process wakes; what does not
is tried again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import Busy, read_cards, read_trace
from tests.simulated_gpu.conftest import Program, Run, Start

MS = 1_000_000
SWITCH_NS = 100_000
LONG_SLICES = {"NVSHARE_SIM_SLICE_NS": str(100 * MS)}
ENDLESS_MS = 3_600_000

KERNEL = """
    d = Driver()
    f, s = d.kernel(), d.stream()
    say("ready")
    wait_for_line()
    d.busy(f, s, int(os.environ["KERNEL_MS"]) * 1_000_000)
    say("launched")
    d.cuStreamSynchronize(s)
"""
LAUNCHES = """
    d = Driver()
    f, s = d.kernel(), d.stream()
    say("ready")
    wait_for_line()
    for _ in range(100):
        d.busy(f, s, 20_000)
        d.cuStreamSynchronize(s)
"""
Launch = Callable[..., Program]


@pytest.fixture
def launch(start: Start) -> Launch:
    """A program that has launched one kernel of so many milliseconds."""

    def launcher(kernel_ms: int, **environment: str) -> Program:
        program = start(KERNEL, KERNEL_MS=str(kernel_ms), **environment)
        assert program.stdout.readline() == "ready\n"
        program.stdin.write("go\n")
        program.stdin.flush()
        assert program.stdout.readline() == "launched\n"
        return program

    return launcher


@pytest.fixture
def mps(tmp_path: Path) -> dict[str, str]:
    """The environment of a client of MPS; a file stands for the control daemon."""
    directory = tmp_path / "mps"
    directory.mkdir()
    (directory / "control").touch()
    return {"CUDA_MPS_PIPE_DIRECTORY": str(directory)}


def finish(program: Program, state: Path) -> list[Busy]:
    """The program's trace after its end."""
    errors = program.communicate("go\n")[1]
    assert program.returncode == 0, errors
    return [busy for busy in read_trace(state) if busy.process_id == program.pid]


def took_ns(busy: Busy) -> int:
    """From when it could run to its end."""
    return busy.end_ns - busy.start_ns


def switches(state: Path) -> int:
    """Context switches of the first GPU."""
    return read_cards(state)[0].context_switches


def again_until(what: str, scene: Callable[[], bool]) -> None:
    """Plays a scene again where a process woke too late for it."""
    assert any(scene() for _ in range(20)), what


def test_saturating_programs_share_the_time(launch: Launch, state: Path) -> None:
    """Without slices the second program waits for the first, or both run at full speed: a card does neither."""

    def scene() -> bool:
        before = switches(state) if state.exists() else 0
        programs = [launch(600, **LONG_SLICES) for _ in range(2)]
        ((first,), (second,)) = [finish(program, state) for program in programs]
        assert first.work_ns == second.work_ns == 600 * MS
        switched = switches(state) - before
        elapsed_ns = max(first.end_ns, second.end_ns) - first.start_ns
        assert elapsed_ns >= 1200 * MS + switched * SWITCH_NS
        return min(took_ns(first), took_ns(second)) > 900 * MS and switched >= 6

    again_until("both run in slices", scene)


def test_launch_bound_programs_switch_for_nothing(start: Start, state: Path) -> None:
    """A program with an empty queue that kept its slice would stop the others for milliseconds."""
    programs = [start(LAUNCHES) for _ in range(2)]
    for program in programs:
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        program.stdin.write("go\n")
        program.stdin.flush()
    traces = [finish(program, state) for program in programs]
    assert [sum(busy.work_ns for busy in trace) for trace in traces] == [100 * 20_000] * 2
    assert switches(state) == 0


def test_launch_bound_beside_saturating(launch: Launch, start: Start, state: Path) -> None:
    """Each small kernel takes the GPU once from the saturating program, which gets it back."""
    launch(ENDLESS_MS)
    small = finish(start(LAUNCHES), state)
    assert [busy.work_ns for busy in small] == [20_000] * 100
    assert 1 <= switches(state) <= 100
    assert max(map(took_ns, small)) > 20_000


def test_lone_program_has_the_whole_gpu(run: Run, state: Path) -> None:
    """Slices must cost nothing where nobody waits, whatever the streams do."""
    run("""
        d = Driver()
        f, streams = d.kernel(), [d.stream(), d.stream()]
        for s in streams * 3:
            d.busy(f, s, 7_000_000)
        d.cuCtxSynchronize()
    """)
    assert [took_ns(busy) for busy in read_trace(state)] == [7 * MS] * 6
    assert switches(state) == 0


def test_programs_without_slices(launch: Launch, state: Path) -> None:
    """NVSHARE_SIM_SLICE_NS=0: a test of something else need not care who else runs."""
    launch(ENDLESS_MS, NVSHARE_SIM_SLICE_NS="0")
    (busy,) = finish(launch(30, NVSHARE_SIM_SLICE_NS="0"), state)
    assert took_ns(busy) == 30 * MS


def test_a_killed_program_loses_its_slice(launch: Launch, start: Start, state: Path) -> None:
    """A slice that only its owner could end would stop the GPU when SIGKILL takes the owner."""
    waiting = start(KERNEL, KERNEL_MS="30")
    assert waiting.stdout.readline() == "ready\n"
    killed = launch(ENDLESS_MS)
    beside = launch(300)
    killed.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    for program, kernel_ms in ((beside, 300), (waiting, 30)):
        (busy,) = finish(program, state)
        assert busy.work_ns == kernel_ms * MS


def test_clients_of_mps_that_fit_run_at_full_speed(launch: Launch, mps: dict[str, str], state: Path) -> None:
    """0.3 and 0.5 of the multiprocessors leave room; processes in turn would not be MPS."""
    launch(ENDLESS_MS, NVSHARE_SIM_DEMAND="0.3", **mps)
    (busy,) = finish(launch(50, NVSHARE_SIM_DEMAND="0.5", **mps), state)
    assert took_ns(busy) == 50 * MS
    assert switches(state) == 0


def test_clients_of_mps_that_do_not_fit_slow_down(launch: Launch, mps: dict[str, str], state: Path) -> None:
    """0.8 and 0.8 take 1.6 times as long; what runs before the second process is noticed counts in full."""
    launch(ENDLESS_MS, NVSHARE_SIM_DEMAND="0.8", **mps)

    def scene() -> bool:
        (busy,) = finish(launch(250, NVSHARE_SIM_DEMAND="0.8", **mps), state)
        assert took_ns(busy) <= 400 * MS + 1
        assert switches(state) == 0
        return took_ns(busy) > 325 * MS

    again_until("it slows down", scene)


def test_demand_of_one_kernel(launch: Launch, run: Run, mps: dict[str, str], state: Path) -> None:
    """A program with large and small kernels slows down only with the large ones."""
    launch(ENDLESS_MS, NVSHARE_SIM_DEMAND="0.75", **mps)
    program = """
        d = Driver()
        f, s = d.kernel(b"nvs_part"), d.stream()
        for demand in (250_000, 1_000_000):
            d.busy(f, s, 100_000_000, demand)
            d.cuStreamSynchronize(s)
    """

    def scene() -> bool:
        run(program, **mps)
        small, large = read_trace(state)[-2:]
        assert took_ns(small) == 100 * MS
        assert took_ns(large) <= 175 * MS + 1
        return took_ns(large) > 125 * MS

    again_until("the large kernel slows down", scene)


def test_active_thread_percentage_caps_the_demand(launch: Launch, mps: dict[str, str], state: Path) -> None:
    """A capped process takes longer, and leaves the others what it may not have."""
    launch(ENDLESS_MS, NVSHARE_SIM_DEMAND="0.75", **mps)
    (busy,) = finish(launch(20, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="25", **mps), state)
    assert took_ns(busy) == 4 * 20 * MS


def test_client_priority(launch: Launch, mps: dict[str, str], state: Path) -> None:
    """A process of normal priority does not notice one below, which gets the GPU when the first is killed."""
    first = launch(ENDLESS_MS, **mps)
    below = launch(20, CUDA_MPS_CLIENT_PRIORITY="1", **mps)
    (busy,) = finish(launch(40, NVSHARE_SIM_DEMAND="0.5", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="50", **mps), state)
    assert took_ns(busy) > 40 * MS, "both have normal priority"
    assert [busy for busy in read_trace(state) if busy.process_id == below.pid] == []
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert finish(below, state)[0].work_ns == 20 * MS
    launch(ENDLESS_MS, CUDA_MPS_CLIENT_PRIORITY="1", **mps)
    (busy,) = finish(launch(40, **mps), state)
    assert took_ns(busy) == 40 * MS


def test_clients_of_mps_share_time_with_other_programs(launch: Launch, mps: dict[str, str], state: Path) -> None:
    """To the time slicer all clients are one program."""
    launch(ENDLESS_MS, **LONG_SLICES)

    def scene() -> bool:
        before = switches(state)
        clients = [launch(300, NVSHARE_SIM_DEMAND="0.5", **mps, **LONG_SLICES) for _ in range(2)]
        took = [took_ns(busy) for client in clients for busy in finish(client, state)]
        return min(took) > 450 * MS and switches(state) >= before + 4

    again_until("they wait for slices of the other program", scene)
