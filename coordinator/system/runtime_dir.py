"""The runtime directory of a coordinator and its clients: its place, its files and its lock.

Invariants: a directory has at most one coordinator, by a lock that the kernel drops with the process.  Only the
directory's owner can replace a file in it or take the lock.  Paths of sockets fit into a socket address.
Imports only light parts of the standard library, because nvshare-run imports it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MAX_SOCKET_PATH_BYTES: Final = 107
SYSTEM_DIRECTORY: Final = Path("/run/nvshare")
_TAKE_OVER_S: Final = 5.0


class RuntimeDirError(Exception):
    """The directory is unusable; the text names the remedy."""


def unusable(path: Path, error: OSError) -> RuntimeDirError:
    """The error for a path that cannot be created or written, with the remedy."""
    remedy = "choose another directory with --runtime-dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free some space or files (`df`, `df -i`) or {remedy}"
    return RuntimeDirError(f"{path}: {error.strerror}; {remedy}")


class _File:
    """A path of a runtime directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RuntimeDir, kind: object) -> Path:
        return directory.path / self._name


@dataclass(frozen=True, slots=True)
class RuntimeDir:
    """Names of the files in one runtime directory."""

    path: Path
    may_be_foreign: bool = field(default=True, compare=False)
    """Another user's coordinator may be used: true for a named directory and the system's, false for a user's own."""

    hooks_socket = _File("hooks.sock")
    control_socket = _File("control.sock")
    events_socket = _File("events.sock")
    lock_file = _File("coordinator.lock")
    keepalive_lock = _File("keepalive.lock")
    daemon_mark = _File("daemon")
    """Exists while a coordinator should run that a supervisor starts again after its end."""
    journal = _File("journal")
    live_settings = _File("live_settings.json")
    simulated_gpu = _File("simulated_gpu")
    mps_socket = _File("mps.sock")
    """Launchers ask here whether their program joins MPS."""
    mps = _File("mps")
    """Directory of the MPS control daemon."""

    def coordinator_pid(self) -> int | None:
        """The process that holds the coordinator's lock; None without one, or without permission to know."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _pid_in(descriptor)
            return None
        finally:
            os.close(descriptor)

    def waiting_reason(self) -> str:
        """Why the coordinator that has the lock does not serve yet, with the remedy; empty without such a reason."""
        if self.coordinator_pid() is None:
            return ""
        try:
            return self.lock_file.read_text(encoding="utf-8", errors="replace").partition("\n")[2].strip()
        except OSError:
            return ""

    def is_foreign(self) -> bool:
        """Whether the directory belongs to another user; for a user's own default also a link in its place."""
        try:
            return self.path.stat(follow_symlinks=self.may_be_foreign).st_uid != os.geteuid()
        except OSError:
            return False

    def is_read_only(self) -> bool:
        """Whether no process here can change it, as a slot's directory in a container."""
        try:
            return bool(os.statvfs(self.path).f_flag & os.ST_RDONLY)
        except OSError:
            return False

    def answers(self) -> bool:
        """Whether the hooks' socket accepts this user's connections."""
        return connect_error(self.hooks_socket) == 0

    def refuses(self) -> bool:
        """Whether the hooks' socket is another user's alone, as in a slot."""
        return connect_error(self.hooks_socket) == errno.EACCES


def connect_error(path: Path) -> int:
    """Error number of a connection to this socket; 0: it is accepted, EAGAIN: too many wait for that."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        return errno.ENAMETOOLONG
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path))


def own_directory(environment: Mapping[str, str] | None = None, user_id: int | None = None) -> RuntimeDir:
    """The directory of a coordinator started here: NVSHARE_RUNTIME_DIR, the system's for root, else the user's own."""
    env = os.environ if environment is None else environment
    uid = os.geteuid() if user_id is None else user_id
    if named := env.get("NVSHARE_RUNTIME_DIR"):
        return RuntimeDir(Path(named).absolute())
    if uid == 0:
        return RuntimeDir(SYSTEM_DIRECTORY)
    if base := env.get("XDG_RUNTIME_DIR"):
        return RuntimeDir(Path(base) / "nvshare", may_be_foreign=False)
    return RuntimeDir(Path(f"/tmp/nvshare-{uid}"), may_be_foreign=False)


def client_directory(environment: Mapping[str, str] | None = None, user_id: int | None = None) -> RuntimeDir:
    """The directory of a client: as `own_directory`, but the system's coordinator comes first.

    During its restart this user's own running coordinator comes first.
    """
    env = os.environ if environment is None else environment
    own, system = own_directory(env, user_id), RuntimeDir(SYSTEM_DIRECTORY)
    if env.get("NVSHARE_RUNTIME_DIR"):
        return own
    return system if system.answers() or (os.path.exists(system.daemon_mark) and not own.answers()) else own


def prepare(directory: RuntimeDir) -> None:
    """Creates the directory, and checks that no other user can change it.  Raises RuntimeDirError."""
    sockets = (directory.hooks_socket, directory.control_socket, directory.events_socket)
    longest = max(len(os.fsencode(path)) for path in sockets)
    if longest > MAX_SOCKET_PATH_BYTES:
        raise RuntimeDirError(
            f"{directory.path}: too long: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes, this one "
            f"{longest}; choose a shorter directory with --runtime-dir or NVSHARE_RUNTIME_DIR"
        )
    mode = 0o755 if directory.path == SYSTEM_DIRECTORY else 0o700
    try:
        directory.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.path.mkdir(mode=mode)
            directory.path.chmod(mode)  # whatever the umask
        found = directory.path.lstat()
    except OSError as error:
        raise unusable(directory.path, error) from None
    if directory.is_read_only():
        raise unusable(directory.path, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeDirError(f"{directory.path}: not a directory; remove it or choose another with --runtime-dir")
    if found.st_uid != os.geteuid():
        raise RuntimeDirError(foreign_text(directory, found.st_uid))
    if found.st_mode & 0o022:
        raise RuntimeDirError(f"{directory.path}: other users may write to it; run `chmod go-w {directory.path}`")
    if not os.access(directory.path, os.R_OK | os.W_OK | os.X_OK):
        raise RuntimeDirError(
            f"{directory.path}: no permission; run `chmod u+rwx {directory.path}` or choose another with --runtime-dir"
        )


def foreign_text(directory: RuntimeDir, owner: int) -> str:
    """Error text for a directory of user `owner`."""
    remedy = "choose another with --runtime-dir (or NVSHARE_RUNTIME_DIR)"
    if not directory.may_be_foreign:
        remedy += ", or name this one to use that user's coordinator"
    return f"{directory.path}: belongs to user {owner}, not to you ({os.geteuid()}); {remedy}"


def lock(directory: RuntimeDir, *, embedded: bool = False) -> int:
    """Takes the coordinator's lock, and removes the sockets of a dead coordinator.

    A daemon ends an embedded coordinator, whose clients reconnect to it.  The lock lasts as long as the returned
    descriptor, which children do not inherit.  Raises RuntimeDirError, also when another coordinator runs here.
    """
    try:
        descriptor = os.open(directory.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unusable(directory.lock_file, error) from None
    if not _flock_soon(descriptor) and (embedded or not _take_over(descriptor)):
        pid = _pid_in(descriptor)
        os.close(descriptor)
        if reason := directory.waiting_reason():
            raise RuntimeDirError(f"the coordinator in {directory.path} (pid {pid}) does not serve yet: {reason}")
        raise RuntimeDirError(
            f"another coordinator (pid {pid or 'unknown'}) runs in {directory.path}; stop it or choose another "
            "directory with --runtime-dir"
        )
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise unusable(directory.lock_file, error) from None
    for stale in (directory.hooks_socket, directory.control_socket, directory.events_socket):
        try:
            stale.unlink(missing_ok=True)
        except OSError as error:
            os.close(descriptor)
            raise RuntimeDirError(
                f"{stale}: {error.strerror}; remove it or choose another directory with --runtime-dir"
            ) from None
    return descriptor


def _flock_soon(descriptor: int) -> bool:
    """Takes the lock, with retries, because `coordinator_pid` in another process holds it for an instant."""
    for attempt in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if attempt >= 4 and _is_coordinator(_pid_in(descriptor)):
                return False
            time.sleep(0.005)
        else:
            return True
    return False


def _take_over(descriptor: int) -> bool:
    """Ends an embedded coordinator and takes its lock.  False for another coordinator, or one that does not end."""
    pid = _pid_in(descriptor) or 0
    try:
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        return False
    try:
        if b"--embedded" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(process, signal.SIGTERM)
        return bool(select.select([process], [], [], _TAKE_OVER_S)[0]) and _flock_soon(descriptor)
    except OSError:
        return False
    finally:
        os.close(process)


def _is_coordinator(pid: int | None) -> bool:
    return pid is not None and pid != os.getpid() and Path(f"/proc/{pid}").exists()


def take_keepalive_exclusively(directory: RuntimeDir) -> int | None:
    """The descriptor of keepalive.lock when no program needs the embedded coordinator any more, else None.

    The coordinator keeps it until its process ends.  A new launcher waits for that end and starts another one.
    """
    descriptor = os.open(directory.keepalive_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def forget_simulation(directory: RuntimeDir) -> bool:
    """Removes the state of simulated GPUs.  False: programs of a launcher use them."""
    with contextlib.suppress(OSError):  # the directory may be gone
        unused = take_keepalive_exclusively(directory)
        if unused is None:
            return False
        directory.simulated_gpu.unlink(missing_ok=True)
        os.close(unused)
    return True


def note_wait(lock: int, reason: str) -> None:
    """Says in the lock file why its coordinator does not serve yet, with the remedy; an empty reason ends that."""
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n{reason}\n".encode(errors="replace"), 0)


def _pid_in(descriptor: int) -> int | None:
    try:
        return int(os.pread(descriptor, 32, 0).partition(b"\n")[0])
    except (OSError, ValueError):
        return None
