"""State that processes share: the capacity of the cards, and the trace that proves exclusivity."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import Busy, overlaps, read_cards, read_trace
from tests.simulated_gpu.conftest import Run, Start

HOLD = """
    d = Driver()
    d.allocate(int(os.environ["HOLD"]))
    print("holding", flush=True)
    wait_for_line()
"""
ONE_GIB = {"NVSHARE_SIMULATE": "1x1GiB"}


NEW_PID_NAMESPACE = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--")


def test_programs_in_containers_are_told_apart(start: Start, run: Run, state: Path) -> None:
    """Broken: programs with the same id in different PID namespaces count as one, or as dead, or never end."""
    try:
        subprocess.run([*NEW_PID_NAMESPACE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"PID namespaces cannot be made here: {getattr(error, 'stderr', error)}")
    run("Driver()", **ONE_GIB)
    work = """
        d = Driver()
        d.allocate(256 << 20)
        d.busy(d.kernel(), None, 1_000_000)
        d.cuCtxSynchronize()
        print(os.getpid(), flush=True)
        wait_for_line()
        print(d.used(), flush=True)
    """
    first, second = (start(work, by=NEW_PID_NAMESPACE) for _ in range(2))
    assert (first.stdout.readline(), second.stdout.readline()) == ("1\n", "1\n")
    run("assert Driver().used() == 512 << 20")
    assert len({busy.process_id for busy in read_trace(state)}) == 2
    first.kill()
    run("""
        d = Driver()
        while d.used() != 256 << 20:
            threading.Event().wait(0.01)
    """)
    assert second.communicate("go\n")[0] == f"{256 << 20}\n"
    run("""
        d = Driver()
        while d.used():
            threading.Event().wait(0.01)
    """)


def test_many_processes_make_one_state_file(start: Start, state: Path) -> None:
    """Racing creators with a file each would not see each other's memory."""
    programs = [start(HOLD, HOLD=str(16 << 20), **ONE_GIB) for _ in range(8)]
    for program in programs:
        assert program.stdout.readline() == "holding\n"
    check = start("d = Driver(); print(d.used(), flush=True)")
    assert int(check.communicate()[0]) == 8 * (16 << 20)
    assert [path for path in state.parent.iterdir() if path.name.startswith(state.name + ".")] == []


def test_a_killed_program_leaves_no_unfinished_work(start: Start, state: Path) -> None:
    """Work that ran at the kill did not end; a record of it would be a false overlap."""
    program = start("""
        d = Driver()
        f, s = d.kernel(), d.stream()
        d.busy(f, s, 1000)
        d.cuStreamSynchronize(s)
        d.busy(f, s, 3_600_000_000_000)
        print("running", flush=True)
        wait_for_line()
    """)
    assert program.stdout.readline() == "running\n"
    program.kill()
    program.wait()
    assert [busy.end_ns - busy.start_ns for busy in read_trace(state)] == [1000]


def test_intervals_without_overlap(run: Run, state: Path) -> None:
    """Programs in turn, touching ends, other cards and streams of one process are no overlap."""
    for device in (0, 1, 1):
        program = (
            f"d = Driver(device={device}); d.busy(d.kernel(), None, 1_000_000 * {device + 1}); d.cuCtxSynchronize()"
        )
        run(program, NVSHARE_SIMULATE="2x1GiB")
    trace = read_trace(state)
    assert [(busy.gpu, busy.end_ns - busy.start_ns) for busy in trace] == [(0, 1_000_000), *[(1, 2_000_000)] * 2]
    assert overlaps(trace) == []
    a, b = 1, 2
    assert overlaps([Busy(0, a, 0, 10, "kernel"), Busy(0, b, 10, 20, "kernel")]) == []
    assert overlaps([Busy(0, a, 0, 10, "kernel"), Busy(1, b, 5, 20, "kernel")]) == []
    assert overlaps([Busy(0, a, 0, 10, "kernel"), Busy(0, a, 5, 20, "kernel")]) == []
    assert overlaps([Busy(0, a, 5, 5, "kernel"), Busy(0, b, 0, 20, "kernel")]) == []
    (found,) = overlaps([Busy(0, a, 0, 10, "kernel"), Busy(0, b, 4, 20, "copy")])
    assert found.overlap_ns == 6


def test_visible_devices(run: Run, state: Path) -> None:
    """CUDA_VISIBLE_DEVICES selects cards by index and by UUID."""
    devices = """
        import uuid
        d = Driver(init=False)
        result = d.result("cuInit", 0)
        if result == 0:
            count, names = c_int(), []
            d.cuDeviceGetCount(byref(count))
            for i in range(count.value):
                raw = (ctypes.c_ubyte * 16)()
                d.cuDeviceGetUuid_v2(raw, i)
                names.append("GPU-" + str(uuid.UUID(bytes=bytes(raw))))
        print(*(names if result == 0 else [result]))
    """
    everything = run(devices, NVSHARE_SIMULATE="3x1GiB").split()
    assert everything == [card.uuid for card in read_cards(state)]
    assert len(set(everything)) == 3
    assert run(devices, CUDA_VISIBLE_DEVICES="2,0").split() == [everything[2], everything[0]]
    assert run(devices, CUDA_VISIBLE_DEVICES=everything[1]).split() == [everything[1]]
    assert run(devices, CUDA_VISIBLE_DEVICES="1,9,0").split() == [everything[1]]
    assert run(devices, CUDA_VISIBLE_DEVICES="").split() == ["100"]


def test_wrong_settings_fail(start: Start, state: Path) -> None:
    """A typo must not give other cards; a foreign file must be neither used nor overwritten."""
    assert "GPUS[xCAPACITY]" in start("d = Driver()", NVSHARE_SIMULATE="two").communicate()[1]
    state.write_bytes(b"precious")
    program = start("d = Driver()")
    errors = program.communicate()[1]
    assert program.returncode != 0
    assert "is not a state file of this version" in errors
    assert state.read_bytes() == b"precious"
