"""Deaths of clients and coordinators, and the lease meanwhile."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.protocol import messages
from tests.daemon.processes import Coordinators, Holder, Hook, Running
from tests.waiting import eventually

Connect = Callable[..., Hook]
Hold = Callable[..., Holder]
LONG = "10min"
"""A quantum or recovery window that no test waits for."""


def lease_of(line: str) -> int:
    return int(line.split()[1])


def stop(holder: Holder) -> None:
    """It neither runs nor ends from now on."""
    holder.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED)


def test_a_goodbye_frees_the_lease(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a process that ends in order kept the GPU until its socket closed."""
    running = coordinators.start("--quantum", LONG)
    first = connect(running).hello("first").attach(wanted=True)
    first.next(messages.Grant)
    second = connect(running).hello("second").attach(wanted=True)
    second.next(messages.GpuSettings)
    first.send(messages.Goodbye())
    assert second.next(messages.Grant)


def test_a_death_frees_the_lease_though_a_child_has_the_connection(
    coordinators: Coordinators, hold: Hold, connect: Connect
) -> None:
    """Broken if a process that a dead holder has left behind kept the GPU (invariant 6)."""
    running = coordinators.start("--quantum", LONG)
    holder = hold(running)
    holder.next("Grant")
    waiting = connect(running).hello().attach(wanted=True)
    waiting.next(messages.GpuSettings)
    holder.kill()
    assert waiting.next(messages.Grant)


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_holder_keeps_its_lease_over_a_restart(
    coordinators: Coordinators, hold: Hold, connect: Connect, end: str
) -> None:
    """Broken if the successor of a killed coordinator, or of one that was stopped for an upgrade, gave the lease to a
    second holder (invariant 7), or a client of libzmq had to be started again with the coordinator."""
    before = coordinators.start("--quantum", LONG)
    holder = connect(before).hello("holder").attach(wanted=True)
    lease = holder.next(messages.Grant).lease_id
    if end == "killed":
        before.kill()
    else:
        assert before.stop() == 0
    after = coordinators.start("--quantum", LONG, NVSHARE_RECOVERY=LONG)
    waiting = hold(after)  # another process: the holder's own would be taken for the holder that comes back
    waiting.next("GpuSettings")
    gpu = after.status()["gpus"][0]
    assert gpu["recovering"]
    assert gpu["holders"] == []
    holder.hello("holder").attach(lease_id=lease)
    assert holder.next(messages.Grant).lease_id == lease
    assert len(after.status()["gpus"][0]["holders"]) == 1
    holder.release(lease)
    assert lease_of(waiting.next("Grant")) > lease


def test_recovery_ends_with_the_death_of_the_expected_holder(
    coordinators: Coordinators, hold: Hold, connect: Connect
) -> None:
    """Broken if a holder that dies during recovery kept everybody waiting until its end."""
    before = coordinators.start("--quantum", LONG)
    # It does not come back by itself: a plain socket does not reconnect, so it ends when the coordinator does.
    holder = hold(before)
    holder.next("Grant")
    stop(holder)
    before.kill()
    after = coordinators.start(NVSHARE_RECOVERY=LONG)
    waiting = connect(after).hello().attach(wanted=True)
    waiting.next(messages.GpuSettings)
    assert after.status()["gpus"][0]["recovering"]
    holder.kill()
    assert waiting.next(messages.Grant)


def test_a_stopped_holder_keeps_its_lease_beyond_recovery(
    coordinators: Coordinators, hold: Hold, connect: Connect
) -> None:
    """Broken if a holder that was stopped over a restart submitted beside the next one afterwards (invariant 7)."""
    recovery_ns = 50_000_000
    before = coordinators.start("--quantum", LONG)
    holder = hold(before)
    holder.next("Grant")
    stop(holder)
    before.kill()
    after = coordinators.start(NVSHARE_RECOVERY=f"{recovery_ns}ns")
    waiting = connect(after).hello().attach(wanted=True)
    waiting.next(messages.GpuSettings)
    begun_ns = after.status()["now_ns"]
    eventually(lambda: after.status()["now_ns"] > begun_ns + 4 * recovery_ns, "several times the window")
    gpu = after.status()["gpus"][0]
    assert gpu["holders"] == []
    assert (gpu["expected_process"], gpu["expected_stopped"]) == (holder.process.pid, True)
    assert f"process {holder.process.pid}, which holds its lease, is stopped" in after.log.read_text()
    holder.process.send_signal(signal.SIGCONT)  # it finds that its connection has ended, and ends too
    assert waiting.next(messages.Grant)


def test_an_overdue_client_is_killed_when_configured(coordinators: Coordinators, hold: Hold, connect: Connect) -> None:
    """Broken if the configured end of a hung client did not come, or hit another process (invariant 10)."""
    running = coordinators.start("--quantum", "1ms", NVSHARE_DRAIN_DEADLINE="50ms", NVSHARE_OVERDUE_ACTION="kill")
    holder = hold(running)
    holder.next("Grant")
    stop(holder)
    bystander = hold(running)
    bystander.next("Welcome")
    assert holder.process.wait() == -signal.SIGKILL
    bystander.next("Grant")


def test_a_mistake_of_our_own_costs_a_restart_and_no_client(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a bug in the coordinator ended it for good, or its restarts had no end."""
    coordinators.program = "crashing.py"
    running = coordinators.start("--quantum", LONG, NVSHARE_RECOVERY=LONG)
    holder = connect(running).hello("holder").attach(wanted=True)
    lease = holder.next(messages.Grant).lease_id
    crashing = [connect(running).hello("crash")]
    eventually(lambda: running.log.read_text().count("serving 1 GPU") == 2, "the restart")
    holder.hello("holder").attach(lease_id=lease)
    assert holder.next(messages.Grant).lease_id == lease
    assert running.process.poll() is None  # the same process: exec
    # The crashing client's libzmq comes back, but it says hello only when told.
    while running.process.poll() is None:
        assert len(crashing) < 10
        crashing.append(connect(running).hello("crash"))
        eventually(
            lambda: (
                running.process.poll() is not None or running.log.read_text().count("serving 1 GPU") > len(crashing)
            ),
            "the next crash",
        )
    assert running.process.returncode == 1
    assert "made-up mistake" in running.log.read_text()


def set_everything(running: Running) -> None:
    """One of each, on the second of two GPUs where there is a choice, and for the client `train`."""
    for request in (
        api.Set(setting="quantum", value=7_000_000, gpu="1"),
        api.Set(setting="policy", value="priority", gpu="1"),
        api.Set(setting="sharing", value="concurrent", gpu="1"),
        api.Set(setting="switch_share", value=0.25, gpu="1"),
        api.Set(setting="host_budget", value=3 << 30),
        api.Set(setting="priority", client="train", value=-4),
        api.Set(setting="weight", client="train", value=12),
        api.Set(setting="limit", client="train", value=2 << 30),
        api.Pause(client="train"),
    ):
        assert "ends" not in running.ask(request)


def what_is_set(running: Running, name: str = "train") -> list[object]:
    """Values that `set_everything` changes."""
    status = running.status()
    (client,) = (client for client in status["clients"] if client["name"] == name)
    first, second = (
        tuple(gpu[key] for key in ("quantum_ns", "policy", "sharing", "switch_share")) for gpu in status["gpus"]
    )
    limits = [seat["limit_bytes"] for seat in client["seats"]]
    own = [client[key] for key in ("priority", "weight", "limit_bytes", "paused")]
    return [first, second, status["host_budget_bytes"], own, limits]


@pytest.mark.parametrize("end", ["stopped", "crashed"])
def test_what_the_operator_set_lasts(coordinators: Coordinators, connect: Connect, hold: Hold, end: str) -> None:
    """Broken if a restart of the coordinator undid any of it, or gave it to another program."""
    coordinators.program = "crashing.py" if end == "crashed" else coordinators.program
    options = ("--quantum", LONG, "--host-budget", "8GiB")
    running = coordinators.start(*options, gpus=2)
    hook = connect(running).hello("train").attach()
    hook.next(messages.GpuSettings)
    before = what_is_set(running)
    set_everything(running)
    as_set = what_is_set(running)
    assert all(one != other for one, other in zip(before[1:], as_set[1:], strict=True))
    assert before[0] == as_set[0]
    if end == "crashed":
        connect(running).hello("crash")
        eventually(lambda: running.log.read_text().count("serving 2 GPU") == 2, "the restart")
    else:
        running.stop()
        running = coordinators.start(*options, gpus=2)
    assert "kept live settings: host_budget, " in running.log.read_text()
    hook.hello("train").attach(wanted=True)
    stranger = hold(running)
    assert lease_of(stranger.next("Grant")), "another program is not paused"
    eventually(lambda: any(client["name"] == "train" for client in running.status()["clients"]), "its return")
    eventually(lambda: what_is_set(running)[-1], "its GPU")
    assert what_is_set(running) == as_set
    (other,) = (client for client in running.status()["clients"] if client["name"] != "train")
    assert (other["priority"], other["weight"], other["limit_bytes"], other["paused"]) == (0, 1, 0, False)
    # What is undone is as if it had never been set; also for the next coordinator.
    assert len(running.ask(api.Unset())["undone"]) == 9
    assert what_is_set(running) == before
    running.kill()
    running = coordinators.start(*options, gpus=2)
    hook.hello("train").attach()
    eventually(lambda: [c for c in running.status()["clients"] if c["name"] == "train" and c["seats"]], "the program")
    assert what_is_set(running) == before
    assert running.status()["live"] == []


@contextlib.contextmanager
def small_file_system(at: Path, options: str) -> Iterator[None]:
    """A tmpfs of its own, where the test may mount one."""
    at.mkdir(mode=0o700)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", str(at)], check=False)
    if made.returncode:
        pytest.skip("may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("what", ["no space", "read-only", "1 files", "3 files"])
def test_a_runtime_directory_that_takes_nothing_ends_the_start_with_one_message(
    coordinators: Coordinators, what: str
) -> None:
    """Broken if a full or read-only directory ended in a traceback, a signal, or without a remedy."""
    directory = coordinators.base / "run"
    count = what.removesuffix(" files")
    with small_file_system(directory, f"nr_inodes={count}" if count.isdecimal() else "size=4k"):
        if what == "no space":
            (directory / "filler").write_bytes(b"x" * 4096)
        elif what == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        code, said = coordinators.refused()
    assert code == 1
    assert "--runtime-dir" in said
    assert len([line for line in said.splitlines() if " INFO: " not in line]) == 1, said
    assert ("Read-only file system" if what == "read-only" else "No space left on device") in said


def test_a_coordinator_goes_on_without_a_journal_and_says_so(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a journal that cannot be written any more stopped the coordinator, or went unseen."""
    running = coordinators.start("--quantum", LONG)
    hook = connect(running).hello("train").attach(wanted=True)
    lease = hook.next(messages.Grant).lease_id
    assert running.status()["problems"] == []
    unlimited = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))  # no file takes a byte
    hook.release(lease, wanted=True)
    lease = hook.next(messages.Grant).lease_id
    (problem,) = running.status()["problems"]
    assert "cannot write " in problem
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, unlimited)
    hook.release(lease, wanted=True)
    lease = hook.next(messages.Grant).lease_id
    assert running.status()["problems"] == []
    assert running.stop() == 0
    # The record that was written last is the one that counts.
    after = coordinators.start(NVSHARE_RECOVERY=LONG)
    assert after.status()["gpus"][0]["recovering"]
    hook.hello().attach(lease_id=lease)
    assert hook.next(messages.Grant).lease_id == lease
