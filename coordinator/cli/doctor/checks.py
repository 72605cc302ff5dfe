"""The doctor's checks: facts in, findings out.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nvshare.client_hook.launcher import HOOK_NAME, preload_entries
from nvshare.coordinator.cli.doctor.facts import Facts, Finding
from nvshare.coordinator.cli.views.sentences import WHY_NOT_SWAP, integrated_lines, mode_lines
from nvshare.coordinator.cli.views.slots import pod_of
from nvshare.coordinator.kubernetes.slots.boundary import VARIABLE
from nvshare.coordinator.model.profile import MEMORY_MODES
from nvshare.coordinator.system.gpu_processes import REMEDY
from nvshare.coordinator.system.processes import ProcessFacts
from nvshare.coordinator.units import count, format_size

_MOST_UNHOOKED = 8


def examine(facts: Facts) -> list[Finding]:
    """All findings, in the order in which a person would look."""
    checks = (
        _driver, _libraries, _directory, _coordinator, _slots, _memory, _mode, _boundary, _parking, _mps, _shell,
        _program, _unhooked,
    )  # fmt: skip
    return [finding for check in checks for finding in check(facts)]


def _driver(facts: Facts) -> Iterator[Finding]:
    machine, status = facts.machine, facts.coordinator.status
    if status is not None and status.get("simulated"):
        yield Finding("ok", "GPUs", f"the coordinator serves {count(len(status['gpus']), 'simulated GPU')}")
    elif not machine.driver:
        remedy = "install or load the driver (`nvidia-smi` must work), or use --simulate"
        yield Finding("problem", "driver", f"the NVIDIA driver is not usable ({machine.driver_error})", remedy)
    elif not machine.cards:
        remedy = "check `nvidia-smi -L`; in a container, pass the GPUs on"
        yield Finding("problem", "GPUs", f"driver {machine.driver} shows no GPU", remedy)
    else:
        yield Finding("ok", "GPUs", f"driver {machine.driver}, {', '.join(machine.cards)}")


def _libraries(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if machine.glibc is None:
        remedy = "use a distribution with glibc, such as Debian instead of Alpine"
        yield Finding("problem", "glibc", "this system's C library is not glibc, which hook and CUDA need", remedy)
    elif machine.hook_glibc is not None and machine.glibc < machine.hook_glibc:
        has, needs = (".".join(map(str, version)) for version in (machine.glibc, machine.hook_glibc))
        remedy = "build the hook on this system: `pip install .` in a checkout"
        yield Finding("problem", "glibc", f"glibc is {has}, and the hook needs {needs}", remedy)
    else:
        yield Finding("ok", "glibc", f"glibc {'.'.join(map(str, machine.glibc))}")
    if machine.hook_error:
        yield Finding("problem", "hook", *_parts(machine.hook_error))
    else:
        yield Finding("ok", "hook", f"the hook is {machine.hook}")


def _directory(facts: Facts) -> Iterator[Finding]:
    directory = facts.directory
    if not directory.exists:
        return  # `_coordinator` says that none runs
    writable = directory.mode & 0o022
    if writable:
        remedy = f"run `chmod go-w {directory.path}`"
        yield Finding("problem", "directory", f"other users may write to {directory.path}", remedy)
    for name, error in (("hooks.sock", directory.hooks), ("control.sock", directory.control)):
        if error == "EACCES":
            text = f"user {facts.shell.user_id} has no right to {directory.path}/{name} of user {directory.owner}"
            remedy = "use the system's coordinator (/run/nvshare), or name your own directory with --runtime-dir"
            yield Finding("problem", "rights", text, remedy)
    if not (writable or directory.hooks or directory.control):
        yield Finding("ok", "rights", f"{directory.path} of user {directory.owner} lets user {facts.shell.user_id} in")


def _coordinator(facts: Facts) -> Iterator[Finding]:
    status = facts.coordinator.status
    if status is None:
        none_runs = facts.directory.control in ("ENOENT", "ECONNREFUSED")
        yield Finding("warning" if none_runs else "problem", "coordinator", *_parts(facts.coordinator.error))
        return
    kind = "embedded coordinator" if status.get("embedded") else "coordinator"
    where = f"{kind} {status['pid']} in {status['runtime_dir']}"
    yield Finding("ok", "coordinator", f"{where} serves {count(len(status['clients']), 'program')}")
    yield from _version(facts, status)
    for problem in status["problems"]:
        yield Finding("problem", "coordinator", *_parts(problem))


def _version(facts: Facts, status: Mapping[str, Any]) -> Iterator[Finding]:
    """A coordinator that was not restarted after an upgrade."""
    machine, has = facts.machine, status.get("version", "an earlier version")
    if has != machine.version:
        text = f"it runs {has}, and this nvshare-ctl is of {machine.version}"
    elif status["installation"] == machine.installation and status["began_s"] < machine.installed_s:
        text = f"it was started before nvshare was installed anew in {machine.installation}"
    else:
        return
    remedy = "restart it: `systemctl restart nvshare`, or end it and start it again; programs wait and go on"
    yield Finding("warning", "coordinator", text, remedy)


def _slots(facts: Facts) -> Iterator[Finding]:
    """Containers on a part of a GPU that nothing holds to it."""
    for slot in (facts.coordinator.status or {}).get("slots") or ():
        if why := slot.get("hook_missing"):
            text = f"{pod_of(slot)} runs without the hook, out of turn: {why}"
            yield Finding("problem", "slots", text, "end the cause, then delete the pod: a new one gets the hook")


def _memory(facts: Facts) -> Iterator[Finding]:
    status = facts.coordinator.status
    if status is None or not facts.memory_bytes:
        return
    budget, memory = int(status["host_budget_bytes"]), facts.memory_bytes
    whose = "this machine or container" if facts.wanted is None else f"the control group of process {facts.wanted}"
    text = f"{whose} has {format_size(memory)} of memory, and the host budget is {format_size(budget)}"
    if budget > memory:
        remedy = f"lower it: `nvshare-ctl set host-budget {format_size(int(memory * 0.75))}`, or raise the limit"
        yield Finding("warning", "host memory", text, remedy)
    else:
        yield Finding("ok", "host memory", text)


def _mode(facts: Facts) -> Iterator[Finding]:
    wanted, mode = facts.shell.environ.get("NVSHARE_MEMORY") or "auto", facts.machine.memory_mode
    if wanted not in MEMORY_MODES:
        text = f"NVSHARE_MEMORY={wanted} is no memory mode, so programs started here have auto"
        yield Finding("warning", "memory mode", text, f"set it to one of {', '.join(MEMORY_MODES)}, or unset it")
    elif wanted != "auto":
        yield Finding("ok", "memory mode", f"programs started here have {wanted}, from NVSHARE_MEMORY")
    elif mode:
        why = f": {WHY_NOT_SWAP[mode]}" if mode in WHY_NOT_SWAP else ""
        mode = "device" if mode == "integrated" else mode
        yield Finding("ok", "memory mode", f"programs started here have {mode} (auto){why}")
    for line in integrated_lines(facts.coordinator.status or {"gpus": ()}):
        yield Finding("ok", "memory", line)
    for line in mode_lines(facts.coordinator.status or {"gpus": (), "clients": ()}):
        yield Finding("ok", "memory mode", line)


def _boundary(facts: Facts) -> Iterator[Finding]:
    if facts.machine.driver:
        why = facts.machine.no_boundary
        text = f"limits of containers hold by the hook alone: {why}" if why else f"driver and toolkit apply {VARIABLE}"
        yield Finding("ok", "memory boundary", text)


def _parking(facts: Facts) -> Iterator[Finding]:
    cannot = facts.machine.cannot_park
    if cannot:
        why, remedy = _parts(cannot)
        yield Finding("warning", "parking", f"idle programs cannot be parked and keep their contexts: {why}", remedy)
    else:
        yield Finding("ok", "parking", "idle programs can be parked")
    for each in (facts.coordinator.status or {"clients": ()})["clients"] if not cannot else ():
        if each.get("seats") and each.get("parking_obstacle"):
            yield Finding("ok", "parking", f"{each['name']} cannot be parked: {each['parking_obstacle']}")


def _mps(facts: Facts) -> Iterator[Finding]:
    status = facts.coordinator.status
    mps = {"mode": "off"} if status is None else status.get("mps", {"mode": "off"})
    if mps.get("state") == "refused":
        yield Finding("warning", "MPS", "the coordinator cannot use MPS", str(mps["reason"]))
    elif mps["mode"] != "off":
        yield Finding("ok", "MPS", f"the coordinator's MPS is {mps.get('state')}")
    elif facts.machine.mps_directory:
        text = f"an MPS control daemon that is not the coordinator's answers in {facts.machine.mps_directory}"
        remedy = "stop it (`echo quit | nvidia-cuda-mps-control`), or let the coordinator start MPS with --mps"
        yield Finding("warning", "MPS", text, remedy)
    else:
        yield Finding("ok", "MPS", "MPS is off")


def _shell(facts: Facts) -> Iterator[Finding]:
    environ = facts.shell.environ
    if _is_set(environ, "NVSHARE_DISABLE"):
        yield Finding("warning", "environment", "NVSHARE_DISABLE is set: programs started here run alone", "unset it")
    if _is_set(environ, "NVSHARE_ENABLE") and facts.shell.python_without_nvshare:
        text = f"NVSHARE_ENABLE is set, but nvshare is not installed in {facts.shell.python_without_nvshare}"
        yield Finding("problem", "environment", text, "install nvshare there, or start programs with nvshare-run")
    yield from _preloads(environ, "this environment")


def _preloads(environ: Mapping[str, str], whose: str) -> Iterator[Finding]:
    entries = preload_entries(environ.get("LD_PRELOAD", ""))
    others = [entry for entry in entries if entry.rpartition("/")[2] != HOOK_NAME]
    if others:
        text = f"LD_PRELOAD of {whose} also names {', '.join(others)}"
        remedy = "if GPU calls fail, try without: libraries that replace CUDA functions may miss the hook's"
        yield Finding("warning", "preloads", text, remedy)


def _program(facts: Facts) -> Iterator[Finding]:
    process = facts.process
    if facts.wanted is None:
        return
    if process is None:
        text = f"there is no process {facts.wanted}"
        yield Finding("problem", "program", text, "find it with `nvshare-ctl clients` or `ps`")
        return
    if not process.readable:
        text, remedy = f"{process} belongs to another user", "run the doctor as that user or as root"
        yield Finding("warning", "program", text, remedy)
        return
    if process.hooked:
        yield _hooked_program(facts, process)
    else:
        yield _unhooked_program(facts, process)
    yield from _preloads(process.environ, str(process))


def _hooked_program(facts: Facts, process: ProcessFacts) -> Finding:
    status = facts.coordinator.status
    clients = [] if status is None else [client["process_id"] for client in status["clients"]]
    if process.process_id in clients:
        return Finding("ok", "program", f"{process} has the hook and a connection to the coordinator")
    own, here = process.environ.get("NVSHARE_RUNTIME_DIR", ""), facts.directory.path
    if own and own != here:
        text = f"{process} has the hook and uses the coordinator in {own}, not in {here}"
        return Finding("warning", "program", text, f"call nvshare-ctl with --runtime-dir {own}")
    if process.has_set("NVSHARE_DISABLE"):
        return Finding("problem", "program", f"{process} takes no turns: NVSHARE_DISABLE is set", "start it without")
    if "NVSHARE_SOCKET" not in process.environ:
        text = f"{process} takes no turns and has no memory limit: its environment was emptied (sudo, su, env -i)"
        return Finding("problem", "program", text, "put nvshare-run behind that command: sudo nvshare-run -- PROGRAM")
    if not process.uses_cuda:
        return Finding("ok", "program", f"{process} has the hook and has not used CUDA yet")
    text = f"{process} has the hook, but no connection to the coordinator"
    return Finding("problem", "program", text, "start it again with NVSHARE_LOG=info and read what the hook says")


def _unhooked_program(facts: Facts, process: ProcessFacts) -> Finding:
    reason, remedy = "it was started without nvshare-run and without NVSHARE_ENABLE=1", "start it with nvshare-run"
    if process.loader == "musl":
        reason, remedy = "it is linked against musl", "use a build for glibc"
    elif process.loader == "static":
        reason, remedy = "it is linked statically", "use a dynamically linked build"
    elif process.has_set("NVSHARE_DISABLE"):
        reason, remedy = "NVSHARE_DISABLE is set", "start it without"
    elif process.has_set("NVSHARE_ENABLE"):
        where = facts.process_without_nvshare
        reason = f"nvshare is not installed in {where}" if where else "NVSHARE_ENABLE works in Python programs alone"
        remedy = "install nvshare there, or start it with nvshare-run" if where else "start it with nvshare-run"
    elif "NVSHARE_SOCKET" in process.environ:  # by nvshare-run, or in a container with a slot
        reason, remedy = "the loader did not load it", "look at its first lines on standard error; see nvshare-run"
    return Finding("problem", "program", f"{process} runs without the hook: {reason}", remedy)


def _unhooked(facts: Facts) -> Iterator[Finding]:
    for gpu, process in facts.unhooked[:_MOST_UNHOOKED]:
        if process.process_id != facts.wanted:
            yield Finding("warning", "other programs", f"{process} uses GPU {gpu} without the hook", REMEDY)


def _is_set(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "0") not in ("", "0")


def _parts(sentence: str) -> tuple[str, str]:
    """A text and its remedy, which follow each other in our messages."""
    text, _, remedy = sentence.partition("; ")
    return text, remedy
