"""The doctor's findings for made-up facts, and the facts that it reads from made-up files."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvshare.client_hook.python_environment import AUTOLOAD, environment_without_nvshare
from nvshare.coordinator.cli import ctl
from nvshare.coordinator.cli.doctor import gather as edge
from nvshare.coordinator.cli.doctor.checks import examine
from nvshare.coordinator.cli.doctor.facts import (
    CoordinatorFacts,
    DirectoryFacts,
    Facts,
    Finding,
    MachineFacts,
    ShellFacts,
)
from nvshare.coordinator.cli.views.sentences import WHY_NOT_SWAP
from nvshare.coordinator.kubernetes.slots import boundary
from nvshare.coordinator.system.gpu_processes import UnhookedWatch
from nvshare.coordinator.system.processes import ProcessFacts, read_process
from nvshare.coordinator.system.runtime_dir import RuntimeDir

STATUS: dict[str, Any] = {
    "pid": 7,
    "version": "",
    "installation": "",
    "began_s": 0.0,
    "runtime_dir": "/run/nvshare",
    "simulated": False,
    "gpus": [{}],
    "clients": [{"process_id": 41}],
    "problems": [],
    "host_budget_bytes": 8 << 30,
    "mps": {"mode": "off"},
}
WELL = Facts(
    machine=MachineFacts("580.1", "", ("card",), "swap", (2, 36), "/lib/libnvshare_hook.so", "", (2, 28), ""),
    directory=DirectoryFacts("/run/nvshare", True, 0, 0o755, "", ""),
    coordinator=CoordinatorFacts(STATUS, ""),
    shell=ShellFacts(1000, {}, ""),
    memory_bytes=16 << 30,
    wanted=None,
    process=None,
    process_without_nvshare="",
    unhooked=(),
)
HOOKED = ProcessFacts(41, "python", 1000, hooked=True, uses_cuda=True, environ={"NVSHARE_SOCKET": "/a/hooks.sock"})
BARE = replace(HOOKED, hooked=False, environ={})


def well(**more: Any) -> dict[str, Any]:
    """A status with these values."""
    return {"coordinator": CoordinatorFacts({**STATUS, **more}, "")}


def machine(**more: Any) -> dict[str, Any]:
    return {"machine": replace(WELL.machine, **more)}


def shell(python: str = "", **environ: str) -> dict[str, Any]:
    return {"shell": ShellFacts(1000, environ, python)}


def program(process: ProcessFacts | None, **environ: str) -> dict[str, Any]:
    found = process if process is None else replace(process, environ={**process.environ, **environ})
    return {"wanted": 41, "process": found}


def test_a_healthy_machine_has_no_remedies() -> None:
    """Broken: the doctor finds fault with a machine on which everything works."""
    for facts in (WELL, replace(WELL, **program(HOOKED)), replace(WELL, **well(simulated=True), **machine(driver=""))):
        assert {(finding.level, finding.remedy) for finding in examine(facts)} == {("ok", "")}


OF_HOST = {"index": 0, "integrated": True, "capacity_bytes": 96 << 30, "total_bytes": 128 << 30} | {
    "available_bytes": 20 << 30,
    "kept_bytes": 12 << 30,
}
TOLD = [{"process_id": 41, "name": "job", "memory_mode": "device", "memory_auto": True}]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "programs started here have swap (auto)"),
        (machine(memory_mode="managed"), f"programs started here have managed (auto): {WHY_NOT_SWAP['managed']}"),
        (machine(memory_mode="integrated"), f"programs started here have device (auto): {WHY_NOT_SWAP['integrated']}"),
        (machine(memory_mode=""), ""),
        (shell(NVSHARE_MEMORY="managed"), "programs started here have managed, from NVSHARE_MEMORY"),
        (well(clients=TOLD) | machine(memory_mode=""), f"job (41) has memory mode device: {WHY_NOT_SWAP['device']}"),
        (
            well(clients=TOLD, gpus=[OF_HOST]) | machine(memory_mode=""),
            f"job (41) has memory mode device: {WHY_NOT_SWAP['integrated']}",
        ),
    ],
)
def test_the_memory_mode_is_told_with_its_reason(changes: dict[str, Any], text: str) -> None:
    """Broken: nobody finds out why programs do not swap."""
    found = examine(replace(WELL, **changes))
    assert [finding.text for finding in found if finding.about == "memory mode"] == ([text] if text else [])


def test_a_gpu_without_memory_of_its_own_is_explained() -> None:
    """Broken: a user takes the capacity for what is free, or does not learn that the host's programs count."""
    found = [each.text for each in examine(replace(WELL, **well(gpus=[OF_HOST]))) if each.about == "memory"]
    assert found == [
        "GPU 0 has no memory but the host's: programs may have 96GiB of 128GiB (capacity); "
        "20GiB are free now, of which the host keeps 12GiB"
    ]


@pytest.mark.parametrize(
    ("driver", "toolkit", "why"),
    [
        ("615.12.01", "1.20.1", ""),
        ("615.12", "", "NVIDIA's container toolkit is not installed, and 1.20.1 is needed"),
        ("700.1", "1.9.3", "NVIDIA's container toolkit is 1.9.3, and 1.20.1 is needed"),
        ("580.95.05", "1.20.1", "driver 580.95.05 is older than r615"),
        ("", "1.20.1", "driver unknown is older than r615"),
    ],
)
def test_the_drivers_memory_limit_is_told_with_its_reason(
    driver: str, toolkit: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an operator believes in a boundary that nothing applies, or never learns that the node has one."""
    monkeypatch.setattr(boundary, "_CGROUP_2", tmp_path)
    assert boundary.obstacle(driver, toolkit) == why
    (found,) = [each for each in examine(replace(WELL, **machine(no_boundary=why))) if each.about == "memory boundary"]
    assert found.text.endswith(why or "apply NVIDIA_GPU_MEMORY_LIMIT")
    monkeypatch.setattr(boundary, "_CGROUP_2", tmp_path / "absent")
    assert boundary.obstacle("615.1", "1.20.1") == "the node has no cgroup v2"


def test_what_cannot_be_parked_is_told() -> None:
    """Broken: nobody finds out why an idle program keeps its room."""
    idle = {"process_id": 41, "memory_mode": "swap", "memory_auto": False, "seats": [{}]}
    why = {"a": "", "b": "it is a client of MPS"}
    clients = [idle | {"name": name, "parking_obstacle": why[name]} for name in why]

    def told(**more: Any) -> list[str]:
        facts = replace(WELL, **well(clients=clients), **machine(**more))
        return [finding.text for finding in examine(facts) if finding.about == "parking"]

    assert told() == ["idle programs can be parked", "b cannot be parked: it is a client of MPS"]
    cannot = "idle programs cannot be parked and keep their contexts: the driver is too old"
    assert told(cannot_park="the driver is too old") == [cannot]


@pytest.mark.parametrize(
    ("has", "text"),
    [
        ({"version": "1"}, "it runs 1, and this nvshare-ctl is of 2"),
        ({}, "it runs an earlier version, and this nvshare-ctl is of 2"),
        ({"version": "2", "installation": "/opt", "began_s": 5.0}, "started before nvshare was installed anew in /opt"),
        ({"version": "2", "installation": "/opt", "began_s": 7.0}, ""),
        ({"version": "2", "installation": "/home", "began_s": 5.0}, ""),
    ],
)
def test_a_coordinator_from_before_an_upgrade_is_told(has: dict[str, Any], text: str) -> None:
    """Broken: after an upgrade the old coordinator serves on, and its faults look like the new version's."""
    status = {key: value for key, value in STATUS.items() if key != "version"} | has
    facts = replace(WELL, coordinator=CoordinatorFacts(status, ""))
    found = examine(replace(facts, **machine(version="2", installation="/opt", installed_s=6.0)))
    warnings = [finding for finding in found if finding.level == "warning"]
    assert len(warnings) == bool(text)
    assert all(text in finding.text and "systemctl restart" in finding.remedy for finding in warnings)


NOWHERE = CoordinatorFacts(None, "no coordinator runs in /x; start one")
ANOTHER = CoordinatorFacts(None, "another version; use its nvshare-ctl")
OPEN, CLOSED, NONE = (
    DirectoryFacts("/run/nvshare", True, 0, 0o777, "", ""),
    DirectoryFacts("/x", True, 5, 0o755, "EACCES", ""),
    DirectoryFacts("/x", False, 0, 0, "ENOENT", "ENOENT"),
)
REFUSED = {"mode": "same_user", "state": "refused", "reason": "stop it"}
UNHOOKED_POD = {"namespace": "a", "pod": "b", "container": "c", "hook_missing": "away"}
PRELOADS = shell(LD_PRELOAD="/a/libnvshare_hook.so:/b/libother.so")
ENABLED, ELSEWHERE = program(BARE, NVSHARE_ENABLE="1"), program(HOOKED, NVSHARE_RUNTIME_DIR="/y")


@pytest.mark.parametrize(
    ("changes", "level", "text", "remedy"),
    [
        (machine(driver="", driver_error="NVML: no"), "problem", "driver is not usable (NVML: no)", "nvidia-smi"),
        (machine(cards=()), "problem", "driver 580.1 shows no GPU", "nvidia-smi -L"),
        (machine(glibc=None), "problem", "is not glibc", "Debian"),
        (shell(NVSHARE_MEMORY="fast"), "warning", "NVSHARE_MEMORY=fast is no memory mode", "auto, swap, managed"),
        (machine(glibc=(2, 17)), "problem", "glibc is 2.17, and the hook needs 2.28", "build the hook"),
        (machine(hook_error="no hook; install it"), "problem", "no hook", "install it"),
        (machine(mps_directory="/tmp/pipe"), "warning", "not the coordinator's answers in /tmp/pipe", "stop it"),
        (well(mps=REFUSED), "warning", "cannot use", "stop it"),
        ({"directory": OPEN}, "problem", "other users may write", "chmod go-w"),
        ({"directory": CLOSED}, "problem", "no right to /x/hooks.sock of user 5", "--runtime-dir"),
        ({"directory": NONE, "coordinator": NOWHERE}, "warning", "no coordinator runs in /x", "start one"),
        ({"coordinator": ANOTHER}, "problem", "another version", "use its nvshare-ctl"),
        (well(slots=[UNHOOKED_POD]), "problem", "a/b/c runs without the hook, out of turn: away", "delete the pod"),
        (well(problems=["cannot write; make room"]), "problem", "cannot write", "make room"),
        ({"memory_bytes": 4 << 30}, "warning", "has 4GiB of memory, and the host budget is 8GiB", "host-budget 3GiB"),
        (shell(NVSHARE_DISABLE="1"), "warning", "NVSHARE_DISABLE is set", "unset it"),
        (shell("/env", NVSHARE_ENABLE="1"), "problem", "not installed in /env", "nvshare-run"),
        (PRELOADS, "warning", "also names /b/libother.so", "try without"),
        (program(None), "problem", "no process 41", "clients"),
        (program(replace(BARE, readable=False)), "warning", "belongs to another user", "as root"),
        (program(BARE), "problem", "without nvshare-run and without NVSHARE_ENABLE=1", "nvshare-run"),
        (program(replace(BARE, loader="musl")), "problem", "linked against musl", "glibc"),
        (program(replace(BARE, loader="static")), "problem", "linked statically", "dynamically"),
        (program(BARE, NVSHARE_DISABLE="1"), "problem", "NVSHARE_DISABLE is set", "without"),
        (ENABLED | {"process_without_nvshare": "/env"}, "problem", "not installed in /env", "install nvshare there"),
        (ENABLED, "problem", "works in Python programs alone", "nvshare-run"),
        (program(BARE, NVSHARE_SOCKET="/a/hooks.sock"), "problem", "the loader did not load it", "standard error"),
        (program(HOOKED) | well(clients=[]), "problem", "no connection to the coordinator", "NVSHARE_LOG"),
        (
            program(replace(HOOKED, environ={})) | well(clients=[]),
            "problem",
            "its environment was emptied",
            "nvshare-run",
        ),
        (program(HOOKED, NVSHARE_DISABLE="1") | well(clients=[]), "problem", "NVSHARE_DISABLE is set", "without"),
        (ELSEWHERE | well(clients=[]), "warning", "coordinator in /y", "--runtime-dir /y"),
        ({"unhooked": ((0, BARE),)}, "warning", "uses GPU 0 without the hook", "nvshare-run"),
    ],
)
def test_each_finding_has_its_remedy(changes: dict[str, Any], level: str, text: str, remedy: str) -> None:
    """Broken: a fault that is known stays unnamed, or nobody says what to do."""
    (found,) = [finding for finding in examine(replace(WELL, **changes)) if finding.level != "ok"]
    assert found.level == level
    assert text in found.text
    assert remedy in found.remedy


def test_a_program_that_has_not_used_cuda_is_well() -> None:
    """Broken: a program that just starts is called faulty."""
    facts = replace(WELL, **program(replace(HOOKED, uses_cuda=False)) | well(clients=[]))
    assert "has not used CUDA yet" in examine(facts)[-1].text


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_the_exit_code_says_whether_there_are_problems(
    level: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a script cannot tell whether a node is fit."""
    facts = {"ok": WELL, "warning": replace(WELL, memory_bytes=1 << 30), "problem": replace(WELL, **program(None))}
    monkeypatch.setattr(edge, "gather", lambda directory, pid: facts[level])
    for words in (["doctor", "--json"], ["doctor"]):
        with pytest.raises(SystemExit) as ended:
            ctl.main(words)
        assert ended.value.code == code
    printed, _, text = capsys.readouterr().out.partition("\n")
    findings = [Finding(**finding) for finding in json.loads(printed)["findings"]]
    assert findings == examine(facts[level])
    assert "\x1b" not in text
    assert all(finding.text in text for finding in findings)


def test_gathering_works_where_nothing_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: the doctor itself fails on a sick machine, or does not know a program."""
    monkeypatch.setenv("NVSHARE_HOOK_LIBRARY", str(tmp_path / "none"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        facts = edge.gather(RuntimeDir(tmp_path / "run"), child.pid)
    assert (facts.directory.exists, facts.coordinator.status) == (False, None)
    assert "does not exist" in facts.machine.hook_error
    assert facts.process is not None
    assert (facts.process.hooked, facts.process.loader, facts.process.readable) == (False, "glibc", True)
    assert examine(facts)


def test_a_python_environment_without_nvshare_is_found(tmp_path: Path) -> None:
    """Broken: NVSHARE_ENABLE=1 has no effect in an environment, and nobody says so."""
    site = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    binaries = tmp_path / "env" / "bin"
    binaries.mkdir()
    (binaries / "python").symlink_to(sys.executable)
    script = tmp_path / "train"
    script.write_text(f"#!{binaries / 'python'}\n")
    for program in (binaries / "python", script):
        assert environment_without_nvshare(str(program)) == str(tmp_path / "env")
    (site / AUTOLOAD).touch()
    assert environment_without_nvshare(str(binaries / "python")) is None
    assert environment_without_nvshare("/bin/sh") is None
    assert environment_without_nvshare(str(tmp_path / "nothing")) is None


def test_a_process_is_read_from_proc() -> None:
    """Broken: what a process has set, or that it is gone, stays unknown."""
    environment = {"NVSHARE_ENABLE": "1", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        found = read_process(child.pid)
        child.stdin.close()
    assert found is not None
    assert found.user_id == os.geteuid()
    assert read_process(child.pid) is None


def test_the_log_names_each_unhooked_program_once(caplog: pytest.LogCaptureFixture) -> None:
    """Broken: NVSHARE_ENABLE=1 without effect stays unnoticed on a server, or fills its log."""
    present = [(0, replace(BARE, environ={"NVSHARE_ENABLE": "1"})), (1, replace(BARE, process_id=42))]
    watch = UnhookedWatch(lambda: present)
    with caplog.at_level(logging.WARNING):
        watch.turn()
        watch.turn()
    assert caplog.messages == [
        "process 41 (python, user 1000) uses GPU 0 without the hook although NVSHARE_ENABLE is set; "
        "install nvshare in the environment of its Python, or start it with nvshare-run"
    ]
