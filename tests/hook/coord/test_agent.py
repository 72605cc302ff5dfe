"""The agent thread in real programs over the simulated GPU, against a coordinator that does what the test says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nvshare.client_hook.launcher import with_preload
from nvshare.coordinator.protocol import messages
from nvshare.simulated_gpu.trace import read_trace
from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.conftest import StartClient
from tests.hook.scripted import NEVER_NS, ScriptedClient, ScriptedCoordinator
from tests.waiting import eventually

PROGRAMS = Path(__file__).parent / "programs"
MS = 1_000_000
SHORT_S = 0.2
"""How long a test looks that something does not happen."""


def hold(
    coordinator: ScriptedCoordinator, client: ScriptedClient, lease_id: int = 7, waiters: int = 0, **more: int
) -> None:
    """The client holds a lease and has submitted one short kernel."""
    client.tell("launch 1000")
    coordinator.welcome(**more)
    coordinator.asked()
    coordinator.grant(lease_id, waiters)
    assert client.answer() == "launched"


def test_waits_for_the_grant_and_releases_on_revoke(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: work reaches the driver without a lease, or a revoked lease is not given back."""
    client.tell("launch 1000")
    attach = coordinator.welcome()
    coordinator.asked()
    assert attach.lease_id == 0
    assert attach.uuid.startswith("GPU-")
    assert client.answer(SHORT_S) == ""
    coordinator.grant(7)
    assert client.answer() == "launched"
    release = coordinator.revoke(7)
    assert (release.drained, release.wanted, release.reason) == (True, False, messages.ReleaseReason.REVOKED)
    assert release.submissions == 1
    client.tell("launch 1000")
    assert coordinator.expect(messages.Request).gpu == 0
    coordinator.grant(8)
    assert client.answer() == "launched"


@pytest.fixture
def older_driver(built: Built, tmp_path: Path) -> str:
    """The directory of a double from before CUDA 12.5."""
    path = tmp_path / "older"
    path.mkdir()
    name, none = b"\0cuCtxRecordEvent\0", b"\0cuCtxNoSuchEvent\0"
    (path / "libcuda.so.1").write_bytes((built.sim_dir / "libcuda.so.1").read_bytes().replace(name, none))
    return str(path)


@pytest.mark.parametrize("older", [False, True])
def test_work_of_another_thread_passes_the_deadline(
    coordinator: ScriptedCoordinator, start: StartClient, older_driver: str, older: bool
) -> None:
    """Broken: where the driver records no event of a whole context, one thread's work holds the release up for ever."""
    client = start(LD_LIBRARY_PATH=older_driver) if older else start()
    hold(coordinator, client)
    assert client.do("block-apart") == "blocked"
    coordinator.send(messages.Revoke(gpu=0, lease_id=7, drain_deadline_ns=50 * MS))
    assert not coordinator.expect(messages.Release).drained
    assert client.do("unblock") == "unblocked"


def test_hello_says_who(coordinator: ScriptedCoordinator, start: StartClient) -> None:
    """Broken: the environment of a client does not reach the coordinator."""
    client = start(
        NVSHARE_PRIORITY="-3",
        NVSHARE_NAME="é" * 40,
        NVSHARE_MEMORY_LIMIT="1.5GiB",
        NVSHARE_WEIGHT="300",
        NVSHARE_GANG="pär",
        NVSHARE_PLACEMENT='["1f",true,"",""]',
    )
    client.tell("launch 1000")
    hello = coordinator.expect(messages.Hello)
    assert hello.protocol == messages.PROTOCOL_VERSION
    assert hello.memory_limit_bytes == 3 << 29
    assert (hello.name, hello.program) == ("é" * 31, "client")
    assert hello.profile == "priority=-3\nweight=300\ngang=pär\n"
    assert hello.placement == '["1f",true,"",""]'


def test_bad_environment_is_said_and_ignored(coordinator: ScriptedCoordinator, start: StartClient) -> None:
    """Broken: a typing mistake in a variable stops a program, or is swallowed."""
    client = start(
        NVSHARE_CLASS="batch\nweight=9",
        NVSHARE_SHARE_LIMIT="\udcff",
        NVSHARE_DEADLINE="1h",
        NVSHARE_MEMORY_LIMIT="lots",
        NVSHARE_ON_LOSS="maybe",
        NVSHARE_MEMORY="disk",
        NVSHARE_WEIGHT="7",
        NVSHARE_GANG="x" * 512,
        NVSHARE_PLACEMENT="x" * 256,
    )
    client.tell("launch 1000")
    hello = coordinator.expect(messages.Hello)
    assert (hello.memory_limit_bytes, hello.memory_mode, hello.placement) == (0, messages.MemoryMode.SWAP, "")
    assert hello.profile == "weight=7\ndeadline=1h\n"
    client.process.kill()
    _, errors = client.ended()
    for variable in (
        "NVSHARE_GANG",
        "NVSHARE_CLASS",
        "NVSHARE_SHARE_LIMIT",
        "NVSHARE_PLACEMENT",
        "NVSHARE_MEMORY_LIMIT",
        "NVSHARE_ON_LOSS",
        "NVSHARE_MEMORY=disk",
    ):
        assert errors.count(variable) == 1


def test_nothing_happens_without_cuda(client: ScriptedClient) -> None:
    """Broken: every process that carries the hook gets threads."""
    assert client.do("threads") == "threads 1"


@pytest.mark.parametrize("changes", [{"NVSHARE_SOCKET": None}, {"NVSHARE_DISABLE": "1"}], ids=["unset", "disabled"])
def test_inert(start: StartClient, changes: dict[str, str | None]) -> None:
    """Broken: a program that nobody opted in is stopped; one whose environment was emptied escapes without a word."""
    client = start(**changes)
    assert client.do("launch 1000") == "launched"
    assert client.do("state").startswith("state 0 0 0 0")
    client.tell("exit")
    assert client.ended()[1].count("NVSHARE_SOCKET is not set") == ("NVSHARE_SOCKET" in changes)


def test_long_kernel_is_not_idle(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a lease is given back while the GPU computes."""
    hold(coordinator, client, idle_release_ns=2 * MS)
    assert client.do(f"launch {300 * MS}") == "launched"
    coordinator.send(messages.Waiters(0, 7, 1))
    release = coordinator.expect(messages.Release)
    assert release.submissions == 2
    assert release.drained
    client.tell("sync")
    assert client.answer() == "synchronised"


def test_yield(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: nvshare_yield does nothing, or gives a lease back that nobody wants."""
    hold(coordinator, client)
    assert client.do("yield") == "yielded"
    assert client.answer(SHORT_S) == ""
    coordinator.nothing(messages.Release)
    coordinator.send(messages.Waiters(0, 7, 1))
    while not client.do("state").startswith("state 2 7 1"):
        pass
    assert client.do("yield") == "yielded"
    assert coordinator.expect(messages.Release).reason == messages.ReleaseReason.IDLE


def test_drain_passes_its_deadline(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a hung kernel hangs everybody else."""
    hold(coordinator, client)
    assert client.do(f"launch {1_000_000 * MS}") == "launched"
    release = coordinator.revoke(7, deadline_ns=20 * MS)
    assert not release.drained
    assert release.drain_ns >= 20 * MS


def test_waiting_thread_makes_the_release_a_request(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a thread that came to the gate during the drain is forgotten."""
    hold(coordinator, client)
    coordinator.received.clear()
    assert client.do("block") == "blocked"
    coordinator.send(messages.Revoke(gpu=0, lease_id=7, drain_deadline_ns=NEVER_NS))
    while not client.do("state").startswith("state 3"):
        pass
    assert client.do("background 1000") == "begun"
    while client.do("state").split()[4] != "1":
        pass
    assert client.do("unblock") == "unblocked"
    assert coordinator.expect(messages.Release).wanted
    coordinator.nothing(messages.Request)
    coordinator.grant(8)
    assert client.answer() == "background launched"


@pytest.mark.parametrize("budget_ns", [0, 2 * MS], ids=["alone", "paced"])
def test_paced_work_and_captures(coordinator: ScriptedCoordinator, client: ScriptedClient, budget_ns: int) -> None:
    """Broken: pacing loses work, deadlocks, or breaks a stream capture."""
    hold(coordinator, client, pacing_budget_ns=budget_ns)
    assert client.do("count 3000 10000") == "counted"
    assert client.do("captured 50 10000") == "captured 0"
    assert client.do("count 500 1000000") == "counted"
    release = coordinator.revoke(7)
    assert release.drained
    assert release.submissions > 3000 + 500
    client.tell("captured 50 10000")
    coordinator.expect(messages.Request)
    coordinator.grant(8)
    assert client.answer() == "captured 0"


def test_exit_of_a_holder(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a program that ends in order looks like one that died, or leaves before its work is done."""
    hold(coordinator, client)
    client.tell("exit")
    coordinator.expect(messages.Goodbye)
    assert client.ended()[0] == 0


def test_exit_while_threads_wait(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: exit() hangs because a thread waits for a lease."""
    assert client.do("background 1000") == "begun"
    coordinator.welcome()
    coordinator.asked()
    client.tell("exit")
    assert client.ended()[0] == 0
    coordinator.expect(messages.Goodbye)


def test_exit_without_a_coordinator(client: ScriptedClient) -> None:
    """Broken: exit() hangs because nobody answers."""
    assert client.do("background 1000") == "begun"
    client.tell("exit")
    assert client.ended()[0] == 0


@pytest.mark.parametrize("mode", ["device", "managed", "swap"])
@pytest.mark.parametrize("held", [True, False])
def test_work_after_the_drivers_end(
    coordinator: ScriptedCoordinator, start: StartClient, mode: str, held: bool
) -> None:
    """Broken: a static object that uses the GPU in its destructor waits for a lease, and the program never ends."""
    client = start(NVSHARE_MEMORY=mode)
    client.tell("late")
    coordinator.welcome()
    assert client.answer() == "late"
    if held:
        client.tell("launch 1000")
        coordinator.asked()
        coordinator.grant(7)
        assert client.answer() == "launched"
    client.tell("exit")
    assert client.answer() == "late 4 4 4 4"
    assert client.ended() == (0, "")


def test_a_constructor_that_waits_for_its_turn(
    coordinator: ScriptedCoordinator, start: StartClient, built: Built, tmp_path: Path
) -> None:
    """Broken: a library that uses the GPU when it is opened waits with the loader's lock, the agent for it."""
    sources = (PROGRAMS / "constructor.c", built.sim_dir / "libcuda.so.1")
    client = start(PLUGIN=str(compile_c(tmp_path / "constructor.so", *sources, flags=("-fPIC", "-shared"))))
    client.tell("open")
    coordinator.welcome()
    coordinator.asked()
    coordinator.grant(7)
    assert client.answer() == "constructing"
    assert coordinator.revoke(7).drained
    client.tell("go on")
    coordinator.expect(messages.Request)
    coordinator.grant(8)
    assert client.answer() == "opened"


def test_a_preload_of_the_users_before_the_hook(
    coordinator: ScriptedCoordinator, start: StartClient, built: Built, tmp_path: Path
) -> None:
    """Broken: a tracer that the user preloads sees nothing, or the hook does not see what comes through it."""
    tracer = compile_c(tmp_path / "tracer.so", PROGRAMS / "tracer.c", flags=("-fPIC", "-shared"))
    client = start(LD_PRELOAD=with_preload(str(tracer), built.hook))
    hold(coordinator, client)
    assert coordinator.revoke(7).submissions == 1
    client.tell("exit")
    assert client.ended() == (0, "1 launches, first\n")


def test_a_profiler_that_takes_the_hook_for_the_driver(
    coordinator: ScriptedCoordinator, start: StartClient, built: Built, tmp_path: Path
) -> None:
    """Broken: under Nsight Compute the hook finds its own functions as the driver's, and calls itself without end."""
    profiler = compile_c(tmp_path / "profiler.so", PROGRAMS / "profiler.c", flags=("-fPIC", "-shared"))
    client = start(LD_PRELOAD=f"{built.hook}:{profiler}")
    hold(coordinator, client)
    assert coordinator.revoke(7).submissions == 1
    client.tell("exit")
    assert client.ended() == (0, "")


def test_gpu_that_is_not_shared(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a GPU that the coordinator does not know cannot be used at all."""
    client.tell("launch 1000")
    coordinator.expect(messages.AttachGpu)
    coordinator.send(messages.Rejected(messages.Rejection.UNKNOWN_GPU, False, "no such GPU here"))
    assert client.answer() == "launched"
    client.tell("exit")
    code, errors = client.ended()
    assert code == 0
    assert "no such GPU here" in errors


def test_a_refusal_names_its_gpu(coordinator: ScriptedCoordinator, start: StartClient) -> None:
    """Broken: the refusal of a GPU counts for another one, whose AttachGpu has no answer yet: it is never shared."""
    client = start(NVSHARE_SIMULATE="2x1GiB")
    assert client.do("background 1000") == "begun"
    assert coordinator.expect(messages.AttachGpu).gpu == 0
    eventually(lambda: client.do("state").split()[4] == "1", "it waits for the GPU that is current now")
    assert client.do("gpu 1") == "gpu"
    assert coordinator.expect(messages.AttachGpu).gpu == 1
    coordinator.send(messages.Rejected(messages.Rejection.UNKNOWN_GPU, False, "no such GPU here", 1))
    assert client.do("launch 1000") == "launched"
    coordinator.settings()
    coordinator.grant(7)
    assert client.answer() == "background launched"


def test_gpu_that_the_program_may_not_use(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a pod uses a card outside of its slot without a lease, or loses its connection by asking for it."""
    client.tell("launch 1000")
    coordinator.expect(messages.AttachGpu)
    coordinator.send(messages.Rejected(messages.Rejection.FORBIDDEN_GPU, False, "no such GPU in slot a"))
    assert client.answer(SHORT_S) == ""
    while (message := coordinator.receive(0)) is not None:
        assert not isinstance(message, messages.State), "it is no longer told of"
    client.process.kill()
    assert client.ended()[1].count("no such GPU in slot a") == 1


def test_refused_for_good(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a program that is refused does not learn why."""
    client.tell("launch 1000")
    coordinator.expect(messages.Hello)
    coordinator.send(messages.Rejected(messages.Rejection.PROTOCOL_VERSION, True, "install the same version"))
    coordinator.disconnected()
    assert client.answer(SHORT_S) == ""
    client.process.kill()
    assert "install the same version" in client.ended()[1]


def test_a_refused_variable_is_told_once(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a mistake in a program's variables is swallowed, or comes back with each restart of the coordinator."""
    mistake = messages.Rejected(messages.Rejection.NOT_ALLOWED, False, "NVSHARE_CLASS: no such class")
    client.tell("launch 1000")
    for _ in range(2):
        coordinator.expect(messages.Hello)
        coordinator.send(messages.Welcome(1))
        coordinator.send(mistake)
        coordinator.expect(messages.AttachGpu)
        coordinator.stop()
        coordinator.restart()
    client.process.kill()
    assert client.ended()[1].count("no such class") == 1


def test_path_of_the_socket_is_too_long(start: StartClient, tmp_path: Path) -> None:
    """Broken: a path that cannot be used is taken for another one."""
    client = start(NVSHARE_SOCKET=str(tmp_path / ("x" * 200)))
    assert client.do("launch 1000") == "launched"
    client.tell("exit")
    assert "NVSHARE_SOCKET is longer" in client.ended()[1]


@pytest.mark.parametrize("budget_ns", [0, 2 * MS], ids=["unpaced", "paced"])
def test_all_work_lies_within_leases(
    coordinator: ScriptedCoordinator, client: ScriptedClient, hook_env: dict[str, str], budget_ns: int
) -> None:
    """Broken: of many threads and streams, one submits without a lease, is lost, or is not waited for."""
    hold(coordinator, client, pacing_budget_ns=budget_ns)
    windows: list[tuple[int, int]] = []
    submissions = 0
    lease_id = 7
    client.tell("storm 6 1500")
    while not (answer := client.answer(0.002)):
        release = coordinator.revoke(lease_id)
        windows.append((release.opened_at_ns, time.monotonic_ns()))
        submissions += release.submissions
        assert release.drained
        lease_id += 1
        coordinator.grant(lease_id)
    assert answer == "stormed"
    release = coordinator.revoke(lease_id)
    windows.append((release.opened_at_ns, time.monotonic_ns()))
    assert submissions + release.submissions == 6 * 1500 + 1
    work = read_trace(Path(hook_env["NVSHARE_SIM_STATE"]))
    assert len(work) == 6 * 1500 + 1
    outside = [b for b in work if not any(begin <= b.start_ns and b.end_ns <= end for begin, end in windows)]
    assert not outside


def test_bursts_lie_within_leases(
    coordinator: ScriptedCoordinator, client: ScriptedClient, hook_env: dict[str, str]
) -> None:
    """Broken: what is submitted while an idle lease is being given back runs outside of any lease, or is lost."""
    hold(coordinator, client, waiters=1, idle_release_ns=MS)
    windows: list[tuple[int, int]] = []
    bursts, lease_id, held = 60, 7, True
    client.tell("count 3 700000")
    while bursts or held:
        message = coordinator.receive(0.0005)
        if isinstance(message, messages.Release):
            assert message.drained
            windows.append((message.opened_at_ns, time.monotonic_ns()))
            held = False
        if isinstance(message, messages.Request) or (isinstance(message, messages.Release) and message.wanted):
            lease_id, held = lease_id + 1, True
            coordinator.grant(lease_id, waiters=1)
        if client.answer(0.0) == "counted":
            bursts -= 1
            if bursts:
                client.tell("count 3 700000")
    work = read_trace(Path(hook_env["NVSHARE_SIM_STATE"]))
    assert len(work) == 60 * 3 + 1
    assert not [b for b in work if not any(begin <= b.start_ns and b.end_ns <= end for begin, end in windows)]


def test_standby_changes_nothing_but_sleep(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a hint that a grant is near opens the gate, keeps it shut, or keeps a processor busy afterwards."""
    client.tell("launch 1000")
    coordinator.welcome()
    coordinator.asked()
    coordinator.send(messages.Standby(0, 2**64 - 1))
    assert client.answer(SHORT_S) == ""
    coordinator.send(messages.Standby(0, 5 * MS))
    coordinator.grant(7)
    assert client.answer() == "launched"
    coordinator.send(messages.Standby(0, 5 * MS))
    assert client.do("launch 1000") == "launched"
    assert coordinator.revoke(7).submissions == 2


def test_two_gpus(coordinator: ScriptedCoordinator, start: StartClient) -> None:
    """Broken: the leases of a process's GPUs are mixed up, or a long drain on one holds up the other."""
    client = start(NVSHARE_SIMULATE="2x1GiB")
    hold(coordinator, client)
    assert client.do(f"launch {1_000_000 * MS}") == "launched"
    assert client.do("gpu 1") == "gpu"
    assert client.do("background 1000") == "begun"
    attach = coordinator.expect(messages.AttachGpu)
    assert attach.gpu == 1
    if not attach.wanted:  # told with the context, before there is work
        assert coordinator.expect(messages.Request).gpu == 1
    coordinator.send(messages.Revoke(gpu=0, lease_id=7, drain_deadline_ns=NEVER_NS))
    coordinator.send(messages.Grant(gpu=1, lease_id=3, waiters=0))
    assert client.answer() == "background launched"
    coordinator.send(messages.Revoke(gpu=1, lease_id=3, drain_deadline_ns=NEVER_NS))
    release = coordinator.expect(messages.Release)
    assert (release.gpu, release.lease_id, release.drained) == (1, 3, True)
