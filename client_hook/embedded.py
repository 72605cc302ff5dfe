"""The embedded coordinator: `nvshare-run` and the notebook opt-in use the running coordinator, else start one.

Each program holds `keepalive.lock` shared, by an inherited descriptor.  The coordinator ends when no client is
connected and it can take that lock exclusively.  `launch.lock` serialises starts.  A coordinator started by hand at the
same time takes `coordinator.lock` and is then used.

Invariants:
- The coordinator is detached: not a child of the program, in its own session, without a terminal.  It inherits no
  descriptors but its log and the readiness pipe.
- Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nvshare.client_hook.launcher import (
    LaunchError,
    check_memory_mode,
    client_environment,
    coordinator_environment,
    find_hook,
)
from nvshare.client_hook.mps import with_mps, without_mps
from nvshare.coordinator.model.profile import Words
from nvshare.coordinator.system.runtime_dir import (
    SYSTEM_DIRECTORY,
    RuntimeDir,
    RuntimeDirError,
    client_directory,
    own_directory,
    prepare,
)
from nvshare.coordinator.units import format_duration, format_size, parse_duration

START_TIMEOUT_S = 30.0
"""Longest wait for a coordinator to become ready, and for another launcher."""

_SYSTEM_WAIT = "10s"
"""Default of NVSHARE_SYSTEM_WAIT: longest wait for a coordinator that a supervisor starts again."""
_ELSEWHERE = "choose another directory with --runtime-dir (or NVSHARE_RUNTIME_DIR)"
_LOG_LIMIT_BYTES = 1 << 20
_LOG_LINES_SHOWN = 12
_FIRST_DESCRIPTOR = 200
"""Above the descriptor numbers that scripts use explicitly."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A running coordinator.  The inheritable descriptor `keepalive` keeps it running; None for another user's."""

    directory: RuntimeDir
    started: bool
    keepalive: int | None


def choose_directory(environ: Mapping[str, str], named: str | None, simulate: str | None) -> RuntimeDir:
    """The runtime directory: the one named on the command line, else see docs/reference/environment.md.

    The system's coordinator comes first if it serves the wanted kind of GPU, real or simulated.
    """
    if named:
        return RuntimeDir(Path(named).absolute())
    if _serves_simulated_gpus(RuntimeDir(SYSTEM_DIRECTORY)) != (simulate is not None):
        return own_directory(environ)
    return client_directory(environ)


@dataclass(frozen=True, slots=True)
class Launch:
    """Start options of a program.  `simulate` None: real GPUs; else the simulated GPUs, empty for the default ones."""

    runtime_dir: str | None = None
    simulate: str | None = None
    options: Words = field(default_factory=dict)
    coordinator_arguments: tuple[str, ...] = ()
    program: str = ""
    mps: bool = True
    """The program joins the coordinator's MPS, where there is one."""


def prepare_client(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """Ensures a running coordinator, and returns the environment of a client's program.  Raises LaunchError."""
    hook = find_hook(environ)
    check_memory_mode(launch.options.get("memory") or environ.get("NVSHARE_MEMORY") or "auto")
    simulate = launch.simulate or environ.get("NVSHARE_SIMULATE") or launch.simulate
    directory = choose_directory(environ, launch.runtime_dir, simulate)
    ensure_coordinator(directory, environ, simulate=simulate, arguments=launch.coordinator_arguments)
    if simulate is not None:
        environ = _on_simulated_gpus(directory, simulate, environ)
    made = client_environment(environ, hook=hook, runtime_dir=directory.path, options=launch.options)
    return with_mps(made, directory, launch.program) if launch.mps else without_mps(made)


def _on_simulated_gpus(directory: RuntimeDir, simulate: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Adds the simulated GPUs to the environment, and their number and size for programs started by the program."""
    from nvshare.simulated_gpu.environment import simulated_environment  # slow: only when simulating
    from nvshare.simulated_gpu.trace import gpus_of

    try:
        made = simulated_environment(directory.simulated_gpu, simulate or None, environ)
        gpus, as_asked = gpus_of(directory.simulated_gpu, simulate)
    except (ValueError, OSError, RuntimeError) as error:
        raise LaunchError(str(error)) from None
    if not as_asked:
        there = f"{gpus.gpus}x{format_size(gpus.capacity_bytes)}"
        raise LaunchError(
            f"the simulated GPUs of {directory.path} are {there}, not {simulate}; ask for {there}, or {_ELSEWHERE}"
        )
    made["NVSHARE_SIMULATE"] = str(gpus)
    return made


def ensure_coordinator(
    directory: RuntimeDir,
    environ: Mapping[str, str],
    *,
    simulate: str | None = None,
    arguments: Sequence[str] = (),
    timeout_s: float = START_TIMEOUT_S,
) -> Attached:
    """A coordinator in `directory` that runs as long as this process, also after exec.

    `simulate` None: real GPUs; else the simulated GPUs (`2x8GiB`, or empty for the default).  A coordinator started
    here gets `arguments`.  Raises LaunchError, with the end of the log of a coordinator that does not start.
    """
    deadline = time.monotonic() + timeout_s
    if os.path.exists(directory.daemon_mark):
        _await_daemon(directory, environ)
    foreign = directory.may_be_foreign and (directory.is_foreign() or directory.is_read_only())
    if foreign and directory.answers():
        _check_kind(directory, simulate)
        return Attached(directory, started=False, keepalive=None)
    try:
        prepare(directory)
    except RuntimeDirError as error:
        raise LaunchError(str(error)) from None
    keepalive = _take_keepalive(directory, deadline)
    try:
        started = False
        if not directory.answers():
            with _locked(directory.path / "launch.lock", deadline):
                if os.path.exists(directory.daemon_mark):  # made or missed meanwhile
                    _await_daemon(directory, environ)
                elif not directory.answers():  # the previous owner of the lock may have started it
                    _forget_simulation(directory, keepalive, deadline)
                    started = _start(directory, environ, simulate, arguments, deadline)
        if not started:
            _check_kind(directory, simulate)
    except BaseException:
        os.close(keepalive)
        raise
    return Attached(directory, started, keepalive)


def _await_daemon(directory: RuntimeDir, environ: Mapping[str, str]) -> None:
    """Waits for a restart of a daemon, which no embedded coordinator may replace.  Raises LaunchError."""
    if directory.answers():
        return
    if directory.refuses():
        raise LaunchError(f"{directory.path}: its coordinator does not serve user {os.geteuid()} there; {_ELSEWHERE}")
    try:
        patience_ns = parse_duration(environ.get("NVSHARE_SYSTEM_WAIT") or _SYSTEM_WAIT)
    except ValueError as error:
        raise LaunchError(f"NVSHARE_SYSTEM_WAIT: {error}") from None
    bound = format_duration(patience_ns)
    sys.stderr.write(f"nvshare: waiting up to {bound} for the coordinator in {directory.path}\n")
    deadline = time.monotonic() + patience_ns / 1e9
    while not directory.answers():
        if time.monotonic() > deadline:
            if reason := directory.waiting_reason():
                raise LaunchError(f"the coordinator in {directory.path} does not serve yet: {reason}")
            raise LaunchError(
                f"the coordinator in {directory.path} does not answer; restart it (see its log), or remove "
                f"{directory.daemon_mark} if it should stay stopped, or {_ELSEWHERE}"
            )
        time.sleep(0.05)


def _take_keepalive(directory: RuntimeDir, deadline: float) -> int:
    opened = _open_private(directory.keepalive_lock, os.O_RDWR)
    try:
        # Blocks only while an embedded coordinator ends: it holds the lock until its process is gone.
        _flock(opened, fcntl.LOCK_SH, deadline, f"the end of the coordinator in {directory.path}")
        try:
            high = fcntl.fcntl(opened, fcntl.F_DUPFD, _FIRST_DESCRIPTOR)
        except OSError:  # a low limit on open files
            high = fcntl.fcntl(opened, fcntl.F_DUPFD, 10)
    finally:
        os.close(opened)
    return high


def _forget_simulation(directory: RuntimeDir, keepalive: int, deadline: float) -> None:
    """Removes the state of an earlier simulation, unless one of its programs still runs."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(keepalive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.simulated_gpu.unlink()
    _flock(keepalive, fcntl.LOCK_SH, deadline, f"the lock on {directory.keepalive_lock}")


def _open_private(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}; {_ELSEWHERE}") from None


def _flock(descriptor: int, kind: int, deadline: float, what: str) -> None:
    pause = 0.001
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LaunchError(f"timed out waiting for {what}; is that process stopped?") from None
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        else:
            return


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    descriptor = _open_private(path, os.O_RDWR)
    try:
        _flock(descriptor, fcntl.LOCK_EX, deadline, f"another launcher to release {path}")
        yield
    finally:
        os.close(descriptor)


def _start(
    directory: RuntimeDir,
    environ: Mapping[str, str],
    simulate: str | None,
    arguments: Sequence[str],
    deadline: float,
) -> bool:
    """Starts a coordinator.  True when it serves, False when another one serves instead."""
    log_path = directory.path / "coordinator.log"
    with contextlib.suppress(OSError):
        if log_path.stat().st_size > _LOG_LIMIT_BYTES:
            log_path.replace(log_path.with_suffix(".log.old"))
    log = _above_standard(_open_private(log_path, os.O_WRONLY | os.O_APPEND))
    log_start = os.fstat(log).st_size
    ready, report = map(_above_standard, os.pipe())
    command = [
        sys.executable,
        "-P",
        "-m",
        "nvshare.coordinator.daemon.main",
        "--embedded",
        "--runtime-dir",
        str(directory.path),
    ]
    command += ["--ready-fd", str(report), *arguments]
    if simulate is not None:
        command.append(f"--simulate={simulate}" if simulate else "--simulate")
    try:
        _spawn_detached(command, coordinator_environment(environ), log, report)
    finally:
        os.close(report)
        os.close(log)
    try:
        came_up = _wait_ready(ready, deadline)
    finally:
        os.close(ready)
    if not came_up and not _wait_for_other(directory, deadline):
        raise LaunchError(f"the coordinator did not start:\n{end_of_log(log_path, log_start)}")
    return came_up


def _above_standard(descriptor: int) -> int:
    """Duplicates a descriptor above 2, since a program may be started without 0, 1 and 2."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def _wait_for_other(directory: RuntimeDir, deadline: float) -> bool:
    """Waits for a coordinator that was started by hand and does not listen yet."""
    if reason := directory.waiting_reason():
        text = f"nvshare: waiting for the coordinator in {directory.path}, which does not serve yet: {reason}\n"
        sys.stderr.write(text)
    while not directory.answers():
        if directory.coordinator_pid() is None or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _spawn_detached(command: list[str], environ: dict[str, str], log: int, report: int) -> None:
    """Starts a process as no child of this one, which may wait for all its children."""
    middle = os.fork()
    if middle:
        with contextlib.suppress(ChildProcessError):  # SIGCHLD may be ignored, by inheritance
            os.waitpid(middle, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
            os.set_inheritable(target, True)  # dup2 does not when both are equal
        os.set_inheritable(report, True)
        _close_all_but(report)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(command[0], command, environ)
    except BaseException as error:
        os.write(2, f"{command[0]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(1)


def _close_all_but(keep: int) -> None:
    """Closes inherited descriptors: an inherited pipe would delay its reader's end of file."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    for descriptor in descriptors:
        if descriptor > 2 and descriptor != keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.close(descriptor)


def _wait_ready(ready: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    if not poll.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        raise LaunchError("the coordinator was not ready in time; see coordinator.log in the runtime directory")
    return os.read(ready, 1) != b""


def end_of_log(log_path: Path, start: int = 0) -> str:
    """The last lines of a log after offset `start`."""
    with log_path.open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    full = "; its file system is full" if os.statvfs(log_path).f_bavail == 0 else ""
    shown = lines[-_LOG_LINES_SHOWN:] or [f"{log_path} is empty{full}"]
    return "\n".join(f"  {line}" for line in shown)


def _check_kind(directory: RuntimeDir, simulate: str | None) -> None:
    """Raises LaunchError if the coordinator's GPUs are real and the program's simulated, or vice versa."""
    simulated = _serves_simulated_gpus(directory)
    if simulated == (simulate is not None):
        return
    has, wants = ("simulated GPUs", "real ones") if simulated else ("real GPUs", "simulated ones")
    raise LaunchError(
        f"the coordinator in {directory.path} serves {has}, and this command needs {wants}; "
        f"{'add' if simulated else 'leave out'} --simulate (or NVSHARE_SIMULATE), or {_ELSEWHERE}"
    )


def _serves_simulated_gpus(directory: RuntimeDir) -> bool:
    """A coordinator of simulated GPUs creates their state file before it serves; one of real GPUs removes it."""
    return os.path.exists(directory.simulated_gpu)
