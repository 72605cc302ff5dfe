"""`nvshare-ctl slot`: parts of GPUs that root gives to one user, as batch systems and hubs do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from nvshare.coordinator.cli import ctl_slot
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.protocol import messages
from tests.daemon.made_up_gpus import uuid_of
from tests.daemon.processes import Hook, Running, ctl
from tests.waiting import eventually

GIB = 1 << 30
ME = str(os.geteuid())


def test_a_slot_is_made_changed_and_removed(
    base: Path, running: Running, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Broken: a prolog's slot is not there when its job starts, lacks its limits, or cuts programs off."""
    capacity = running.status()["gpus"][1]["capacity_bytes"]
    words = ("slot", "add", "job-1", "--user", ME, "--gpu", "1", "--share-request", "25%", "--memory-limit")
    made = ctl(running.directory.path, *words, "25%", "--json")
    assert made.returncode == 0, made.stderr
    place = Path(json.loads(made.stdout)["directory"])
    hook = Hook(context, place / "hooks.sock").hello()
    hook.attach(1)
    assert hook.next(messages.GpuSettings).memory_limit_bytes == capacity // 4
    assert ctl(place, "status").returncode == 0, "nvshare-ctl works within the job"
    assert ctl(running.directory.path, *words, "3GiB").stdout == f"{place}\n"
    assert hook.next(messages.GpuSettings).memory_limit_bytes == 3 * GIB
    (client,) = running.ask(api.Status())["clients"]
    assert (client["group"], client["share_request"]) == ("job-1", 0.25)
    for view in (("clients",), ("top", "--once"), ("slots",)):
        shown = ctl(running.directory.path, *view).stdout
        assert "SLOT" in shown or view == ("slots",)
        assert "job-1" in shown, shown
    assert ctl(running.directory.path, "slot", "remove", "job-1").returncode == 0
    eventually(lambda: [slot["removed"] for slot in running.status()["slots"]] == [True], "only its program is left")
    assert ctl(running.directory.path, "slot", "remove", "job-1").returncode == 0, "an epilog may run twice"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_slot_serves_its_user_alone(base: Path, running: Running) -> None:
    """Broken: a user who reads another one's job id in `squeue` uses that job's share."""
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(1); os.setuid(int(sys.argv[2])); "
        "socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    )

    def connects(user: int) -> bool:
        command = [sys.executable, "-c", code, str(base / "slots" / "job-1" / "hooks.sock"), str(user)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    for owner, other in ((65534, 1), (1, 65534)):  # the second time for another user: a recycled name
        assert ctl(running.directory.path, "slot", "add", "job-1", "--user", str(owner)).returncode == 0
        assert (connects(owner), connects(other)) == (True, False)


def test_mistakes_are_named(base: Path, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a prolog with a mistake says nothing of use, or leaves half a slot."""
    monkeypatch.setattr(ctl_slot, "_SERVED_WITHIN_S", 0.05)
    at = running.directory.path
    for words, code, said in (
        (("a/b", "--user", ME), 1, "'a/b' cannot be a slot"),
        (("x", "--user", ME, "--gpu", "7"), 1, f"there is no GPU '7'; this coordinator has 0 ({uuid_of(0)})"),
        (("x", "--user", "no-such-user"), 2, "no user 'no-such-user' on this machine"),
        (("x", "--user", ME, "--share-request", "2"), 2, "--share-request"),
        (("x", "--user", ME, "--memory-limit", "much%"), 2, "--memory-limit"),
        (("x", "--user", ME, "--slots-dir", str(base / "other")), 1, "no coordinator listens there"),
    ):
        done = ctl(at, "slot", "add", *words)
        assert (done.returncode, said in done.stderr) == (code, True), (words, done.stderr)
    assert ctl(base / "nowhere", "slot", "add", "x", "--user", ME).returncode == 3
    assert not [*(base / "slots").iterdir(), *(base / "other").iterdir()]
