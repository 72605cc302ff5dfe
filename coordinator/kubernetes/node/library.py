"""`nvshare-install-library`: installs the hook on the node for containers to mount, one directory a version.

A restarted container mounts the version that it was first given, so a version stays while a slot names it.

A version's directory holds the library, and a file `ld.so.preload` that names it for the container's loader.  For pods
that mount the library themselves, it lies at every path to which a glibc expands `$LIB` in LD_PRELOAD: lib, lib64,
lib/x86_64-linux-gnu, lib/aarch64-linux-gnu; all are the same file.

Invariants: a version's directory appears complete (temporary name, fsync, rename) and never changes.  `current` is
replaced atomically.  An installation keeps the versions that slots use, the new one and the previous one; it keeps all
while the slots' versions are unknown.

Non-goals: gRPC, the contents of slots.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from nvshare.client_hook.launcher import HOOK_NAME, LaunchError, find_hook
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.system.version import VersionOption, run_command, version

CURRENT: Final = "current"
LIBRARY: Final = f"lib/{HOOK_NAME}"
PRELOAD: Final = "ld.so.preload"
IN_CONTAINER: Final = "/opt/nvshare"
"""Where containers mount a version's directory."""
_PRELOAD_CONTENT: Final = f"{IN_CONTAINER}/{LIBRARY}\n".encode()
_LINKS: Final = {
    "lib64": "lib",
    "lib/x86_64-linux-gnu": ".",
    "lib/aarch64-linux-gnu": ".",
    HOOK_NAME: LIBRARY,
}
_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_]*-[0-9a-f]{12}")


class InstallError(Exception):
    """The installation failed; the text names the remedy."""


def name_for(content: bytes) -> str:
    """`<version>-<digest12>`, the digest of both files."""
    return f"{version().replace('-', '_')}-{hashlib.sha256(content + _PRELOAD_CONTENT).hexdigest()[:12]}"


def current(directory: Path) -> str | None:
    """The version that new containers mount; None if no complete one is installed."""
    try:
        name = (directory / CURRENT).readlink().name
    except OSError:
        return None
    return name if all((directory / name / file).is_file() for file in (LIBRARY, PRELOAD)) else None


def install(hook: Path, directory: Path, slots_dir: Path | None) -> str:
    """Installs this hook as the current version; returns the version's name.  Raises InstallError."""
    try:
        content = hook.read_bytes()
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        _check_executable(directory)
        with _locked(directory):
            name = name_for(content)
            _put(directory, name, content)
            before = current(directory)
            if before != name:
                _point(directory, name)
            _clean(directory, {name, before or name}, slots_dir)
    except OSError as error:
        raise InstallError(f"{error.filename or directory}: {error.strerror}; choose another --to") from None
    return name


def in_use(slots_dir: Path | None) -> set[str] | None:
    """Versions that the slots' containers have mounted.  None: unknown, as after a reboot of the node, when the plugin
    restores slots without knowing their version."""
    if slots_dir is None or not slots_dir.is_dir():
        return None
    names = {slot.library for slot in slots.read_all(slots_dir).values()}
    return None if "" in names else names


def _check_executable(directory: Path) -> None:
    if os.statvfs(directory).f_flag & os.ST_NOEXEC:
        raise InstallError(
            f"{directory}: its file system is mounted noexec, so programs cannot load the library from it; "
            "choose a directory elsewhere with --to (/run often is noexec, /var/lib is not)"
        )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _put(directory: Path, name: str, content: bytes) -> None:
    place = directory / name
    files = {LIBRARY: content, PRELOAD: _PRELOAD_CONTENT}
    with contextlib.suppress(OSError):
        if all((place / file).read_bytes() == wanted for file, wanted in files.items()):
            return
    fresh = directory / f".{name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    for folder in (fresh, fresh / "lib"):
        folder.mkdir()
        folder.chmod(0o755)
    for link, target in _LINKS.items():
        (fresh / link).symlink_to(target)
    for path, wanted in files.items():
        with (fresh / path).open("xb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(wanted)
            file.flush()
            os.fsync(file.fileno())
    if place.exists():  # left by a crash of the node: its content does not match the digest in its name
        broken = directory / f".{name}.broken"
        shutil.rmtree(broken, ignore_errors=True)
        place.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    fresh.rename(place)
    _sync(directory)


def _point(directory: Path, name: str) -> None:
    fresh = directory / f".{CURRENT}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    fresh.replace(directory / CURRENT)
    _sync(directory)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean(directory: Path, keep: set[str], slots_dir: Path | None) -> None:
    used = in_use(slots_dir)
    if used is None:
        return
    keep = keep | used
    for place in directory.iterdir():
        if _VERSION.fullmatch(place.name) and place.name not in keep and place.is_dir():
            shutil.rmtree(place, ignore_errors=True)


app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command(help="Installs the hook library where this node's containers can mount it.")
def run(
    to: Annotated[
        Path,
        typer.Option("--to", envvar="NVSHARE_LIBRARY_DIR", help="directory on the host; one subdirectory a version"),
    ],
    slots_dir: Annotated[
        Path | None,
        typer.Option(envvar="NVSHARE_SLOTS_DIR", help="directory of slots: versions that slots use are kept"),
    ] = None,
    version: VersionOption = False,
) -> None:
    """The command line as Typer reads it."""
    if slots_dir is None:
        typer.echo("nvshare-install-library: no --slots-dir: old versions are not removed", err=True)
    name = install(find_hook(os.environ), to.absolute(), slots_dir)
    typer.echo(str(to / name))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point.  Exit codes: 0 installed, 1 failed, 2 wrong command line."""
    try:
        code = run_command(app, list(sys.argv[1:] if argv is None else argv), "nvshare-install-library") or 0
    except (InstallError, LaunchError) as error:
        typer.echo(f"nvshare-install-library: {error}", err=True)
        code = 1
    raise SystemExit(code)
