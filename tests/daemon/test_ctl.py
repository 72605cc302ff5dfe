"""nvshare-ctl against a running coordinator: output, JSON, exit codes."""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.users import user_name
from tests.daemon.made_up_gpus import uuid_of
from tests.daemon.processes import Coordinators, Hook, Running, ctl, environment
from tests.waiting import eventually

Connect = Callable[..., Hook]


def answer(running: Running, *words: str) -> Any:
    done = ctl(running.directory.path, *words, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_status_and_clients_show_what_there_is(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if the operator could not see who holds a GPU and who waits, or --runtime-dir worked in one place only."""
    running = coordinators.start("--quantum", "60s", gpus=2)
    first = connect(running).hello("alpha").attach(wanted=True)
    first.next(messages.Grant)
    second = connect(running).hello("beta").attach(wanted=True)
    second.next(messages.GpuSettings)
    status = answer(running, "status")
    assert [gpu["waiting"] for gpu in status["gpus"]] == [1, 0]
    assert status["gpus"][0]["uuid"] == uuid_of(0)
    holder = next(client for client in status["clients"] if client["client"] == status["gpus"][0]["holders"][0])
    assert holder["name"] == "alpha"
    nowhere, named = coordinators.base / "nothing", ("--runtime-dir", str(running.directory.path))
    for shown in (ctl(nowhere, "status", *named).stdout, ctl(nowhere, "status", before=named).stdout):
        assert "made-up GPU" in shown
        assert "alpha" in shown
    shown = ctl(running.directory.path, "clients").stdout
    assert "beta" in shown
    assert "waiting" in shown
    assert {client["name"] for client in answer(running, "clients")["clients"]} == {"alpha", "beta"}


def test_use_is_counted_over_restarts(coordinators: Coordinators, connect: Connect, tmp_path: Path) -> None:
    """Broken: nobody can say who has used the GPUs, or a restart or a reboot forgets it."""
    kept = tmp_path / "kept"
    for hides in ("false", "true"):
        running = coordinators.start("--usage-dir", str(kept), NVSHARE_HIDE_OTHER_USERS=hides)
        hook = connect(running).hello("train").attach(wanted=True)
        lease = hook.next(messages.Grant).lease_id
        hook.release(lease, wanted=True)
        hook.next(messages.Grant)
        hook.close()
        ended = functools.partial(lambda ran: ran.status()["clients"] == [], running)
        eventually(ended, "the end of the program")
        assert running.stop() == 0
        assert {stat.S_IMODE(file.stat().st_mode) for file in kept.iterdir()} == {0o600 if hides == "true" else 0o644}
        shutil.rmtree(running.directory.path)
    running = coordinators.start("--usage-dir", str(kept))
    (mine,) = answer(running, "usage", "--since", "1d")["usage"]
    assert (mine["name"], mine["share"]) == (user_name(os.getuid()), 1.0)
    assert mine["gpu_seconds"] > 0
    shown = ctl(running.directory.path, "usage", "--by", "class").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["since", "CLASS", "batch"]
    refused = ctl(running.directory.path, "usage", "--since", "yesterday")
    assert (refused.returncode, "is not a duration" in refused.stderr) == (2, True)
    (tmp_path / "file").touch()
    code, text = coordinators.refused("--usage-dir", str(tmp_path / "file"), directory=coordinators.base / "other")
    assert code == 1
    assert "usage_dir: " in text
    assert "choose another --usage-dir" in text


def test_each_setting_is_set_and_shown(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a setting did not reach the coordinator, or the wrong GPU or client."""
    running = coordinators.start(gpus=2)
    hook = connect(running).hello("train").attach()
    hook.next(messages.GpuSettings)
    answer(running, "set", "quantum", "auto", "--gpu", "1")
    answer(running, "set", "policy", "priority", "--gpu", uuid_of(1))
    said = ctl(running.directory.path, "set", "sharing", "concurrent", "--gpu", uuid_of(0)).stdout
    assert said == "sharing is concurrent on GPU 0\n"
    answer(running, "set", "priority", "train", "-5")
    answer(running, "set", "weight", "train", "12")
    answer(running, "set", "class", "train", "best-effort")
    said = ctl(running.directory.path, "set", "share", "train", "--request", "30%", "--limit", "0.5").stdout
    assert "a share request of 30% and a share limit of 50%" in said
    refused = ctl(running.directory.path, "set", "share", "train", "--limit", "0.2")
    assert (refused.returncode, "above the limit" in refused.stderr) == (1, True)
    answer(running, "set", "limit", "train", "2GiB")
    assert hook.next(messages.GpuSettings).memory_limit_bytes == 2 << 30
    answer(running, "pause", str(os.getpid()))
    status = answer(running, "status")
    first, second = status["gpus"]
    assert (first["policy"], first["sharing"], first["quantum_automatic"]) == ("round_robin", "concurrent", False)
    assert (second["policy"], second["sharing"], second["quantum_automatic"]) == ("priority", "exclusive", True)
    client = status["clients"][0]
    assert (client["priority"], client["paused"], client["limit_bytes"]) == (-5, True, 2 << 30)
    assert (client["weight"], client["gang"], status["gangs"]) == (12, "", [])
    assert (client["job_class"], client["share_request"], client["share_limit"]) == ("best_effort", 0.3, 0.5)
    answer(running, "limit", "train", "--memory", "3GiB")
    assert hook.next(messages.GpuSettings).memory_limit_bytes == 3 << 30
    answer(running, "set", "switch-share", "2%", "--gpu", "1")
    answer(running, "set", "host-budget", "3GiB")
    refused = ctl(running.directory.path, "set", "capacity", "1GiB")
    assert refused.returncode == 2
    assert "--capacity" in refused.stderr, "the remedy of a setting that is read at the start"
    status = answer(running, "status")
    assert [gpu["switch_share"] for gpu in status["gpus"]] == [0.05, 0.02]
    assert status["host_budget_bytes"] == 3 << 30
    assert " 2% " in ctl(running.directory.path, "status", "-o", "wide").stdout
    answer(running, "resume", f"c{client['client']}")
    answer(running, "set", "limit", "train", "0")
    client = answer(running, "clients")["clients"][0]
    assert (client["paused"], client["limit_bytes"]) == (False, 0)


def test_who_is_refused_host_memory_is_shown(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if nobody could see who has the host's memory, or one's own coordinator kept a part for other users."""
    running = coordinators.start("--host-budget", "4GiB")
    hook = connect(running).hello("train")
    hook.send(messages.State(messages.HOST, 0, 0, 0, 0, 0, asks=1, total_bytes=4 << 30))
    assert hook.next(messages.Target).total_bytes == 4 << 30
    assert "user " not in ctl(running.directory.path, "status").stdout
    hook.send(messages.State(messages.HOST, 0, 0, 0, 0, 0, asks=2, total_bytes=5 << 30))
    assert "4GiB" in hook.next(messages.Rejected).text
    assert hook.next(messages.Target).total_bytes == 4 << 30
    line = f"  user {os.getuid()}: 1 program with 4GiB, no more available; refused once\n"
    assert line in ctl(running.directory.path, "status").stdout
    assert line in ctl(running.directory.path, "memory").stdout


def test_memory_is_shown_and_limits_say_what_is_beyond_them(coordinator: Running, connect: Connect) -> None:
    """Broken if the operator could not see where memory is, or thought that a limit had freed some."""
    hook = connect(coordinator).hello("train").attach()
    hook.next(messages.GpuSettings)
    hook.send(messages.State(0, 0, 6 << 30, 4 << 30, 0, 2 << 30))
    hook.send(messages.State(messages.HOST, 0, 0, 0, 0, 0, asks=1, total_bytes=2 << 30))
    hook.next(messages.Target)
    where = coordinator.directory.path
    shown = ctl(where, "memory").stdout
    assert "6GiB" in shown
    assert "train" in shown
    assert "2GiB of " in shown, "the host's share"
    assert "cannot allocate more" in ctl(where, "limit", "train", "--memory", "5GiB").stdout
    assert "has a limit of 7GiB of GPU memory\n" in ctl(where, "limit", "train", "--memory", "7GiB").stdout
    assert "clients get no more" in ctl(where, "set", "host-budget", "1GiB").stdout


def test_changes_reach_a_lease_that_is_held(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if pause did not take the lease away, resume did not give it back, or a new quantum waited for the next
    lease."""
    running = coordinators.start("--quantum", "60s")
    hook = connect(running).hello("job").attach(wanted=True)
    lease = hook.next(messages.Grant).lease_id
    answer(running, "pause", "job")
    assert hook.next(messages.Revoke).lease_id == lease
    hook.release(lease, wanted=True)
    eventually(lambda: not running.status()["gpus"][0]["holders"], "the release")
    answer(running, "resume", "job")
    again = hook.next(messages.Grant).lease_id
    assert again > lease
    connect(running).hello("waiting").attach(wanted=True).next(messages.GpuSettings)
    assert answer(running, "set", "quantum", "5ms")["quantum_ns"] == 5_000_000
    assert hook.next(messages.Revoke).lease_id == again


def test_explain_says_who_runs_and_why(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if nobody could see why programs share a GPU as they do, or what overrides the policy."""
    running = coordinators.start("--policy", "auto", "--sharing", "auto", "--quantum", "auto", gpus=2)
    where = running.directory.path
    for name in ("alpha", "beta"):
        connect(running).hello(name).attach(wanted=True).next(messages.Grant)
    first, second = answer(running, "explain")["gpus"]
    assert [each["name"] for each in first["running"]] == ["alpha", "beta"]
    assert "2 programs run side by side" in first["why"]
    assert (second["running"], second["why"]) == ([], "no program wants the GPU")
    shown = ctl(where, "explain", "--gpu", "0").stdout
    assert shown.startswith(
        f"GPU 0 (made-up GPU): {first['why']}\n  policy auto, sharing auto, quantum 100ms (auto, 5%)"
    )
    user = user_name(os.getuid())
    assert f"  running: beta ({user}, {os.getpid()}), batch, progress -\n" in shown
    assert f"alpha ({user}), beta ({user})" in ctl(where, "status").stdout
    answer(running, "set", "sharing", "exclusive", "--gpu", "0")
    assert "one program at a time" in ctl(where, "explain").stdout
    assert ctl(where, "explain", "--gpu", "7").returncode == 1


def test_live_settings_are_shown_and_removed(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if nobody could see why the settings are not as configured, or could not go back."""
    running = coordinators.start("--quantum", "60s", gpus=2)
    where = running.directory.path
    hook = connect(running).hello("train", priority=3).attach()
    hook.next(messages.GpuSettings)
    assert "live setting" not in ctl(where, "status").stdout
    answer(running, "set", "quantum", "5ms")
    answer(running, "set", "policy", "priority", "--gpu", "1")
    answer(running, "set", "priority", "train", "9")
    answer(running, "pause", "train")
    answer(running, "set", "share", "train", "--limit", "0.7")
    answer(running, "set", "class", "train", "interactive")
    shown = ctl(where, "status").stdout
    for line in (
        f"live setting: share-limit of train (pid {os.getpid()}): 70%\n",
        "live setting: quantum: 5ms on GPU 0, 1\n",
        "live setting: policy: priority on GPU 1\n",
        f"live setting: priority of train (pid {os.getpid()}): 9\n",
        f"live setting: paused of train (pid {os.getpid()}): yes\n",
    ):
        assert line in shown
    assert ctl(where, "unset", "quantum", "--gpu", "1").stdout == f"removed: quantum: 5ms on GPU {uuid_of(1)}\n"
    assert [gpu["quantum_ns"] for gpu in answer(running, "status")["gpus"]] == [5_000_000, 60_000_000_000]
    assert "removed: priority" in ctl(where, "unset", "priority", "train").stdout
    assert answer(running, "clients")["clients"][0]["priority"] == 3
    assert len(answer(running, "unset", "share", "train")["undone"]) == 1
    answer(running, "unset", "class", "train")
    client = answer(running, "clients")["clients"][0]
    assert (client["job_class"], client["share_request"], client["share_limit"]) == ("batch", 0.0, 1.0)
    answer(running, "resume", "train")
    again = ctl(where, "unset", "paused", "train")
    assert (again.returncode, again.stdout) == (1, "")
    assert "no such live setting" in again.stderr
    assert [each["setting"] for each in answer(running, "unset", "--all")["undone"]] == ["quantum", "policy"]
    assert answer(running, "status")["live"] == []
    assert [gpu["policy"] for gpu in answer(running, "status")["gpus"]] == ["round_robin", "round_robin"]


def test_a_command_says_when_its_effect_ends(coordinators: Coordinators) -> None:
    """Broken if the operator believed that a setting lasts which could not be written."""
    running = coordinators.start()
    (running.directory.path / "live_settings.json.new").mkdir()
    said = ctl(running.directory.path, "set", "quantum", "5ms")
    assert said.returncode == 0
    assert "; it ends with this coordinator: " in said.stdout
    assert "problem: " in ctl(running.directory.path, "status").stdout
    assert answer(running, "status")["gpus"][0]["quantum_ns"] == 5_000_000


MISTAKES = (
    (["pause", "nobody"], 1, "no client 'nobody'"),
    (["pause", "twin"], 1, "matches 2 clients"),
    (["set", "quantum", "1s", "--gpu", "9"], 1, "'9' is not a GPU"),
    (["set", "policy", "chaos"], 1, "no policy 'chaos'; known: "),
    (["set", "quantum", "3"], 2, "not a duration"),
    (["set", "quantum", "2h"], 2, "1ms to 1h"),
    (["set", "limit", "twin", "lots"], 2, "not a size"),
    (["limit", "twin"], 2, "--memory"),
    (["limit", "nobody", "--memory", "1GiB"], 1, "no client 'nobody'"),
    (["limit", "twin", "--memory", "lots"], 2, "not a size"),
    (["set", "switch-share", "70%"], 2, "0.1% to 50%"),
    (["set", "host-budget", "0"], 2, "BUDGET"),
    (["set", "sharing", "sometimes"], 2, "exclusive"),
    (["set", "priority", "twin", "9999999999"], 2, "priority"),
    (["set", "weight", "twin", "0"], 2, "weight"),
    (["set", "class", "twin", "urgent"], 2, "interactive"),
    (["set", "share", "twin"], 2, "request"),
    (["set", "share", "twin", "--limit", "0"], 2, "limit"),
    (["set", "share", "twin", "--request", "0.6", "--limit", "0.5"], 2, "above"),
    (["set", "nothing"], 2, "nothing"),
    (["unset"], 2, "name a setting or --all"),
    (["unset", "--all", "quantum"], 2, "name a setting or --all"),
    (["unset", "nothing"], 2, "setting"),
    (["unset", "priority", "twin"], 1, "matches 2 clients"),
    (["unset", "quantum"], 1, "no such live setting"),
    (["frobnicate"], 2, "frobnicate"),
)


def test_mistakes_are_named(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a refused command looked like a success, or did not say why."""
    where = coordinators.start("--log-level", "error").directory.path
    twins = [connect(coordinators.started[0]).hello("twin") for _ in range(2)]
    for twin in twins:
        twin.next(messages.Welcome)
    for words, code, said in MISTAKES:
        done = ctl(where, *words)
        assert done.returncode == code, words
        assert said in " ".join(done.stderr.replace("│", " ").split())
        if code == 1:
            refused = ctl(where, *words, "--json")
            assert refused.returncode == 1, words
            assert said in json.loads(refused.stdout)["error"]["text"]


def test_without_a_coordinator_the_remedy_is_named(coordinators: Coordinators) -> None:
    """Broken if the tool hung, or was silent, where nothing runs."""
    for words in (["status"], ["events"], ["set", "quantum", "1s"]):
        done = ctl(coordinators.base / "nothing", *words)
        assert done.returncode == 3
        assert "start nvshare-coordinator" in done.stderr
        done = ctl(coordinators.base / "nothing", *words, "--json")
        assert done.returncode == 3
        assert json.loads(done.stdout)["error"]["code"] == "no_coordinator"


def followed(running: Running, *options: str) -> subprocess.Popen[str]:
    """`nvshare-ctl events`."""
    command = [sys.executable, "-m", "nvshare.coordinator.cli.ctl", "events", *options]
    env = environment(NVSHARE_RUNTIME_DIR=str(running.directory.path))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_events_are_followed(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if the stream missed grants, or its lines were no JSON."""
    running = coordinators.start("--quantum", "1ms")
    follower = followed(running, "--json", "--count", "8")
    hook = connect(running).hello("busy").attach(wanted=True)
    # Leases come and go until the follower has seen its eight events and ends.
    ended = os.pidfd_open(follower.pid)
    while not select.select([ended], [], [], 0)[0]:
        hook.release(hook.next(messages.Grant).lease_id, wanted=True)
    os.close(ended)
    events = [json.loads(line) for line in follower.communicate()[0].splitlines()]
    assert follower.returncode == 0
    assert len(events) == 8
    assert [event["seq"] for event in events] == list(range(events[0]["seq"], events[0]["seq"] + 8))
    assert {"granted", "released"} <= {event["kind"] for event in events}
    assert all(event["at_ns"] > 0 for event in events)


def test_the_follower_ends_with_the_coordinator(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if `events` waited for ever for a coordinator that is gone."""
    running = coordinators.start()
    follower = followed(running)
    hook = connect(running).hello("busy").attach(wanted=True)
    assert follower.stdout is not None
    while not select.select([follower.stdout], [], [], 0)[0]:
        hook.release(hook.next(messages.Grant).lease_id, wanted=True)
    running.kill()
    _, said = follower.communicate()
    assert follower.returncode == 3
    assert "has ended" in said


def test_a_trace_has_leases_and_waits(
    coordinators: Coordinators, connect: Connect, tmp_path: Path
) -> None:
    """Broken if a recording missed what had begun before it."""
    running = coordinators.start("--quantum", "60s")
    connect(running).hello("alpha").attach(wanted=True).next(messages.Grant)
    connect(running).hello("beta").attach(wanted=True).next(messages.GpuSettings)
    out = tmp_path / "run.json"
    said = ctl(running.directory.path, "trace", "--seconds", "0.1", "-o", str(out))
    assert (said.returncode, "1 lease, 2 programs" in said.stdout) == (0, True)
    found = {event["cat"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"}
    assert found == {"lease", "plan", "wait"}
    assert ctl(running.directory.path, "trace", "--seconds", "0.1", "-o", "/nowhere/x").returncode == 1
