"""Checkpoints: a program whose memory and contexts leave the GPU and come back, by calls of another process.

Each test has two cards of 1 GiB, a worker (a CUDA program that evaluates expressions) and a caller.
"""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import read_cards, read_trace
from tests.simulated_gpu.conftest import Program, Run, Start
from tests.waiting import eventually

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
OPERATING_SYSTEM, ILLEGAL_STATE, NOT_READY, NOT_SUPPORTED, UNKNOWN = 304, 401, 600, 801, 999

BYTES = 8 << 20
"""Device memory of a worker that `WORKER` allocates, in two halves."""

WORKER = """
    d = Driver()
    first, second = d.allocate(4 << 20), d.allocate(4 << 20)
    d.write(first, bytes(range(256)) * (1 << 14))
    kernel, stream, graph = d.kernel(), d.stream(), c_void_p()
    d.cuStreamBeginCapture_v2(stream, 0)
    d.cuMemcpyDtoDAsync_v2(second, first, c_size_t(4 << 20), stream)
    assert d.busy(kernel, stream, 1_000_000) == 0
    d.cuStreamEndCapture(stream, byref(graph))
    graph = d.instantiate(graph)

    def launch():
        "Runs the graph: `second` then has the contents of `first`."
        d.cuMemsetD8_v2(second, 0, c_size_t(4 << 20))
        d.cuGraphLaunch(graph, stream)
        d.cuStreamSynchronize(stream)
        return d.read(second, 4 << 20) == bytes(range(256)) * (1 << 14)

    say("ready")
    for line in sys.stdin:
        say(repr(eval(line)))
"""

CALLER = """
    d = Driver(init=False)
    d.cuInit(0)
    say("ready")
    for line in sys.stdin:
        step, pid, *words = line.split()
        say("asking")
        say(d.state(int(pid)) if step == "state" else d.step(step, int(pid), *words))
"""

Ask = Callable[..., int]


@pytest.fixture(autouse=True)
def cards(sim_env: dict[str, str]) -> None:
    """Two cards of 1 GiB."""
    sim_env["NVSHARE_SIMULATE"] = "2x1GiB"


def ready(program: Program) -> Program:
    """The program, once it has said so."""
    line = program.stdout.readline()
    assert line == "ready\n", line + program.communicate()[1]
    return program


def send(program: Program, line: str) -> None:
    program.stdin.write(line + "\n")
    program.stdin.flush()


def evaluate(worker: Program, expression: str) -> object:
    send(worker, expression)
    return ast.literal_eval(worker.stdout.readline())


@pytest.fixture
def ask(start: Start) -> Ask:
    """`ask("Lock", pid, 1000)`: the result of the call, made by a process of its own; "state" is CUprocessState."""
    return asking(ready(start(CALLER)))


def asking(caller: Program) -> Ask:
    def ask(step: str, pid: int, *words: object) -> int:
        send(caller, " ".join(map(str, (step, pid, *words))))
        assert caller.stdout.readline() == "asking\n"
        return int(caller.stdout.readline())

    return ask


def park(ask: Ask, pid: int) -> None:
    assert ask("Lock", pid, 0) == ask("Checkpoint", pid) == 0


def wake(ask: Ask, pid: int, *pairs: str) -> None:
    assert ask("Restore", pid, *pairs) == ask("Unlock", pid) == 0


def nvml(run: Run) -> list[tuple[int, list[int]]]:
    """Of each card as NVML tells it: the memory in use, and the process ids."""
    found: list[tuple[int, list[int]]] = ast.literal_eval(
        run("""
            import pynvml as n
            n.nvmlInit()
            cards = [n.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
            pids = [[p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(card)] for card in cards]
            print([(n.nvmlDeviceGetMemoryInfo(card).used, ids) for card, ids in zip(cards, pids)])
        """)
    )
    return found


FREE: list[tuple[int, list[int]]] = [(0, []), (0, [])]


def sleeps(process: Program) -> bool:
    """The main thread of a single-threaded program waits in a system call."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_maps_that_are_refused(start: Start, run: Run, ask: Ask, state: Path) -> None:
    """Broken: a wrong map puts two GPUs on one, or loses the program."""
    worker = ready(start(WORKER, CUDA_VISIBLE_DEVICES="0"))
    zero, one = (card.uuid for card in read_cards(state))
    other = zero[:-2] + "77"
    park(ask, worker.pid)
    for pairs in (
        [f"{zero}={one}"],  # the other GPU would stay where it is
        [f"{one}={one}"],  # its own GPU is missing
        [f"{zero}={other}"],
        [f"{other}={zero}"],
        [f"{zero}={one}", f"{one}={zero}", f"{zero}={zero}"],
    ):
        assert ask("Restore", worker.pid, *pairs) == INVALID_VALUE, pairs
    assert ask("state", worker.pid) == CHECKPOINTED
    wake(ask, worker.pid, f"{zero}={one}", f"{one}={zero}")
    assert evaluate(worker, "launch()") is True
    assert nvml(run)[1] == (BYTES, [worker.pid])


def test_a_restoration_without_room(start: Start, run: Run, ask: Ask) -> None:
    """Broken: a restoration overfills the card, or a coordinator may try it again, which driver 580 does not allow."""
    worker = ready(start(WORKER))
    park(ask, worker.pid)
    holder = start(f"d = Driver(); d.allocate((1 << 30) - {BYTES} + 512); say('ready'); wait_for_line()")
    ready(holder)
    assert ask("Restore", worker.pid) == OUT_OF_MEMORY
    assert ask("state", worker.pid) == CHECKPOINTED
    assert nvml(run) == [((1 << 30) - BYTES + 512, [holder.pid]), (0, [])]
    holder.communicate()
    assert ask("Restore", worker.pid) == OPERATING_SYSTEM
    assert ask("Unlock", worker.pid) == ILLEGAL_STATE
    worker.kill()
    worker.wait()
    assert nvml(run) == FREE


def test_a_lock_waits_for_work_and_for_calls(start: Start, ask: Ask, state: Path) -> None:
    """Broken: a checkpoint moves memory under running work, or a lock that times out leaves the program blocked."""
    worker = ready(start(WORKER))
    evaluate(worker, "exec('block = d.held(stream); block.__enter__()')")
    evaluate(worker, "d.busy(kernel, stream, 5_000_000)")
    before = len(read_trace(state))
    assert ask("Lock", worker.pid, 20) == NOT_READY
    assert ask("state", worker.pid) == RUNNING
    assert evaluate(worker, "d.result('cuStreamQuery', stream)") == NOT_READY
    evaluate(worker, "exec('t = threading.Thread(target=d.cuStreamSynchronize, args=(stream,)); t.start()')")
    assert ask("Lock", worker.pid, 20) == NOT_READY
    evaluate(worker, "block.__exit__(None, None, None)")
    assert ask("Lock", worker.pid) == 0
    assert [busy.kind for busy in read_trace(state)[before:]] == ["kernel"]
    assert ask("Unlock", worker.pid) == 0
    evaluate(worker, "t.join()")


def test_steps_in_wrong_states(start: Start, ask: Ask) -> None:
    """Broken: a step out of order succeeds, or changes the state."""
    worker = ready(start(WORKER))
    following = {"Lock": LOCKED, "Checkpoint": CHECKPOINTED, "Restore": LOCKED, "Unlock": RUNNING}
    allowed = {RUNNING: ["Lock"], LOCKED: ["Checkpoint", "Unlock"], CHECKPOINTED: ["Restore"]}
    here = RUNNING
    for step in ("Lock", "Checkpoint", "Restore", "Unlock"):
        assert ask("state", worker.pid) == here
        for wrong in following.keys() - allowed[here]:
            assert ask(wrong, worker.pid) == ILLEGAL_STATE
        assert ask("state", worker.pid) == here
        assert ask(step, worker.pid) == 0
        here = following[step]
    assert evaluate(worker, "launch()") is True


UNSUPPORTED = {
    "managed memory": "d.managed(4096)",
    "exported memory": "d.cuIpcGetMemHandle((ctypes.c_ubyte * 64)(), first)",
    "a shared descriptor": "d.cuMemExportToShareableHandle(byref(c_int()), d.physical(2 << 20), 1, c_uint64(0))",
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_memory_without_checkpoint(what: str, start: Start, ask: Ask) -> None:
    """Broken: a parked program has memory that the driver does not save."""
    worker = ready(start(WORKER))
    evaluate(worker, f"[{UNSUPPORTED[what]}] and None")
    assert ask("Lock", worker.pid) == 0
    assert ask("Checkpoint", worker.pid) == NOT_SUPPORTED
    assert ask("state", worker.pid) == LOCKED
    assert ask("Unlock", worker.pid) == 0
    assert evaluate(worker, "launch()") is True


def test_imported_memory_has_no_checkpoint(start: Start, ask: Ask) -> None:
    """Broken: memory of another process is parked, or a program stays unsupported after it has closed such memory."""
    exporter, importer = ready(start(WORKER)), ready(start(WORKER))
    handle = evaluate(exporter, "(lambda h: (d.cuIpcGetMemHandle(h, first), bytes(h)))((ctypes.c_ubyte * 64)())[1]")
    evaluate(importer, "exec('''class Handle(ctypes.Structure): _fields_ = [('b', ctypes.c_ubyte * 64)]''')")
    evaluate(importer, "exec('p = c_uint64()')")
    evaluate(importer, f"d.cuIpcOpenMemHandle_v2(byref(p), Handle.from_buffer_copy({handle!r}), 1)")
    assert ask("Lock", importer.pid) == 0
    assert ask("Checkpoint", importer.pid) == NOT_SUPPORTED
    assert ask("Unlock", importer.pid) == 0
    evaluate(importer, "d.cuIpcCloseMemHandle(p)")
    park(ask, importer.pid)
    wake(ask, importer.pid)
    assert evaluate(importer, "launch()") is True


def test_instances_and_clients_of_mps_have_no_checkpoint(start: Start, tmp_path: Path) -> None:
    """Broken: a coordinator learns only on a card that MIG and MPS exclude checkpoints."""
    (tmp_path / "control").touch()
    split = {"NVSHARE_SIM_MIG": "0:2"}
    ask = asking(ready(start(CALLER, **split)))
    for expected, variables in ((OUT_OF_MEMORY, split), (NOT_SUPPORTED, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})):
        worker = ready(start(WORKER, **variables))
        assert ask("Lock", worker.pid) == 0
        assert ask("Checkpoint", worker.pid) == expected
        assert ask("Unlock", worker.pid) == 0
        assert evaluate(worker, "launch()") is True


def test_processes_that_cannot_be_asked(start: Start, run: Run, ask: Ask) -> None:
    """Broken: a wrong process id blocks the caller, or another user's program can be stopped."""
    worker, plain = ready(start(WORKER)), ready(start("say('ready'); wait_for_line()"))
    expected = {-1: INVALID_VALUE, 0: INVALID_VALUE, 1 << 30: INVALID_VALUE, plain.pid: NOT_INITIALIZED}
    for pid, result in expected.items():
        assert [ask(step, pid) for step in ("Lock", "Checkpoint", "Restore", "Unlock")] == [result] * 4
    other = worker.pid if os.geteuid() == 0 else 1  # process 1 belongs to another user
    assert run(
        f"""
        d = Driver(init=False)
        d.cuInit(0)
        if os.geteuid() == 0:
            os.setuid(65534)
        state, thread = c_int(7), c_int(7)
        print(d.step("Lock", {other}), d.result("cuCheckpointProcessGetState", {other}, byref(state)), state.value)
        """
    ).split() == [str(OPERATING_SYSTEM)] * 2 + ["7"]
    assert ask("state", worker.pid) == RUNNING


def test_arguments_and_older_drivers(start: Start, run: Run) -> None:
    """Broken: reserved bytes and missing arguments pass, or an old driver seems to have the interface."""
    worker = ready(start(WORKER))
    check = f"""
        d, pid = Driver(init=False), {worker.pid}
        thread, bad = c_int(), (ctypes.c_ubyte * 64)(*[0] * 63, 1)
        print(*(d.result("cuCheckpointProcessGet" + what, pid, None) for what in ("State", "RestoreThreadId")))
        print(*(d.result("cuCheckpointProcess" + step, pid, bad) for step in ("Lock", "Checkpoint", "Unlock")))
        print(d.step("Restore", pid))
        d.cuInit(0)
        print(d.result("cuCheckpointProcessRestore", pid, bad), d.step("Restore", pid, f"{{d.uuid(0)}}={{d.uuid(0)}}"))
        print(d.result("cuCheckpointProcessGetRestoreThreadId", pid, byref(thread)))
        print(os.path.exists(f"/proc/{{pid}}/task/{{thread.value}}") and thread.value != pid)
    """
    assert run(check).split() == ["1", "1", *["1"] * 3, "3", "1", "401", "0", "True"]
    assert run(check, NVSHARE_SIM_DRIVER_VERSION="12080").split()[5:8] == ["3", "1", "1"], "pairs came later"
    assert run(check, NVSHARE_SIM_DRIVER_VERSION="12060").split()[:8] == ["801"] * 8
    old = ready(start(WORKER, NVSHARE_SIM_DRIVER_VERSION="12060"))
    assert asking(ready(start(CALLER)))("Lock", old.pid) == NOT_INITIALIZED


def test_fork_exec_and_exit_of_a_locked_program(start: Start, run: Run, ask: Ask) -> None:
    """Broken: a child waits for a lock that nobody opens, or a parked program cannot end."""
    worker = ready(start(WORKER))
    assert ask("Lock", worker.pid) == 0
    in_child = "os._exit(d.result('cuStreamQuery', stream))"
    in_parent = "os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    assert evaluate(worker, f"{in_parent} if (child := os.fork()) else {in_child}") == NOT_INITIALIZED
    assert ask("Checkpoint", worker.pid) == 0
    worker.communicate()
    assert worker.returncode == 0
    assert nvml(run) == FREE
    again = ready(start(WORKER, NVSHARE_SIM_FAULTS="slow:cuCheckpointProcessLock=3600000000000"))
    caller = ready(start(CALLER))
    send(caller, f"Lock {again.pid}")
    assert caller.stdout.readline() == "asking\n"
    eventually(lambda: sleeps(caller), "the caller waits for the lock")
    send(again, "os.execvp('cat', ['cat'])")
    assert int(caller.stdout.readline()) == OPERATING_SYSTEM, "the restore thread ended with the program"
    assert ask("Lock", again.pid) == NOT_INITIALIZED
    again.send_signal(signal.SIGKILL)


def test_one_restore_thread(run: Run) -> None:
    """Broken: two threads that start the driver at once start two restore threads, which take each step twice."""
    run("""
        d, together = Driver(init=False), threading.Barrier(8)
        threads = [threading.Thread(target=lambda: (together.wait(), d.cuInit(0))) for _ in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        def names():
            for t in os.listdir("/proc/self/task"):
                try: yield open(f"/proc/self/task/{t}/comm").read().strip()
                except OSError: pass  # it has ended
        while "simulated_ckpt" not in names(): pass  # it names itself
        assert list(names()).count("simulated_ckpt") == 1
    """)
