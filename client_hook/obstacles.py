"""Detects programs into which the system cannot load the hook, before they start.

LD_PRELOAD fails silently (static, setuid), with an obscure message (32 bits), or by ending the program (musl).  The
check follows the program's `#!` lines to an ELF file, whose header names the loader.  It does not see child programs.

Invariants: an unreadable file is no obstacle; exec reports its error.  Imports only cheap parts of the standard
library, because this runs before every command.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_LINE_BYTES = 256
"""Length of a `#!` line read by the kernel."""
_MOST_SCRIPTS = 5
_PT_INTERP = 3
_MOST_HEADERS = 256
_LONGEST_LOADER = 4096


@dataclass(frozen=True, slots=True)
class Obstacle:
    """`text` is a sentence for the user.  `deadly`: the program would end if LD_PRELOAD named the hook."""

    text: str
    deadly: bool = False


@dataclass(frozen=True, slots=True)
class _Elf:
    """Facts of an ELF header.  `loader` empty: none."""

    bits: int
    machine: int
    loader: str


def find_obstacle(program: str) -> Obstacle | None:
    """The obstacle to loading the hook into this program; None when none is detected."""
    try:
        return _check(program)
    except (OSError, struct.error, ValueError, OverflowError):
        return None


def _check(program: str) -> Obstacle | None:
    path = executed_file(program)
    elf = read_elf(path)
    if elf is None:
        return None
    shown = program if path == program else f"{program} is a script for {path}, which"
    loader = elf.loader.rpartition("/")[2] or os.path.basename(os.path.realpath(path))
    if loader.startswith("ld-musl"):
        return Obstacle(
            f"{shown} is linked against musl, but the hook and CUDA need glibc: it runs without the hook; "
            "use a build for glibc if it needs a GPU",
            deadly=True,
        )
    ours = read_elf("/proc/self/exe")
    if ours is not None and (elf.bits, elf.machine) != (ours.bits, ours.machine):
        kind = f"{elf.bits}-bit" if elf.bits != ours.bits else "foreign (made for another processor)"
        return Obstacle(
            f"{shown} is a {kind} program, for which no hook exists: it runs without the hook; use a {ours.bits}-bit "
            "build"
        )
    if not elf.loader and not loader.startswith("ld"):  # a loader started by hand does preload
        return Obstacle(
            f"{shown} is linked statically, so no library can be preloaded: it runs without the hook, but its child "
            "programs may have it; use a dynamically linked build if it needs a GPU itself"
        )
    if _changes_privileges(path):
        return Obstacle(
            f"{shown} changes its privileges (setuid, setgid, capabilities), so it and its child programs run without "
            f"the hook; write nvshare-run behind it: {program} ... nvshare-run -- COMMAND"
        )
    return None


def executed_file(path: str) -> str:
    """The file that the kernel executes after all `#!` lines."""
    for _ in range(_MOST_SCRIPTS):
        with open(path, "rb") as file:
            start = file.read(_LINE_BYTES)
        if not start.startswith(b"#!"):
            break
        words = start[2:].partition(b"\n")[0].split()
        if not words:
            break
        path = os.fsdecode(words[0])
        if path.endswith("/env") and len(words) > 1 and words[1][:1] != b"-" and b"=" not in words[1]:
            path = _on_path(os.fsdecode(words[1])) or path
    return path


def _on_path(name: str) -> str | None:
    from shutil import which

    return which(name)


def read_elf(path: str) -> _Elf | None:
    """Facts of an ELF file of this machine's byte order; None for any other file.  Raises OSError, struct.error."""
    with open(path, "rb") as file:
        ident = file.read(16)
        if len(ident) < 6 or ident[:4] != b"\x7fELF" or ident[5] != (1 if struct.pack("=H", 1)[0] else 2):
            return None
        wide = ident[4] == 2
        rest = file.read(48 if wide else 36)
        machine: int = struct.unpack_from("=H", rest, 2)[0]
        loaders = (_text(file, offset, size) for offset, size in _loader_segments(file, rest, wide))
        return _Elf(bits=64 if wide else 32, machine=machine, loader=next(loaders, ""))


def _loader_segments(file: BinaryIO, header: bytes, wide: bool) -> Iterator[tuple[int, int]]:
    """Offset and size of each PT_INTERP."""
    (table,) = struct.unpack_from("=Q" if wide else "=I", header, 16 if wide else 12)
    size, count = struct.unpack_from("=HH", header, 38 if wide else 26)
    for index in range(min(count, _MOST_HEADERS)):
        file.seek(table + index * size)
        entry = file.read(size)
        kind, offset = struct.unpack_from("=I4xQ" if wide else "=II", entry)
        if kind == _PT_INTERP:
            (length,) = struct.unpack_from("=Q" if wide else "=I", entry, 32 if wide else 16)
            yield offset, length


def _text(file: BinaryIO, offset: int, size: int) -> str:
    file.seek(offset)
    return os.fsdecode(file.read(min(size, _LONGEST_LOADER)).partition(b"\0")[0])


def _changes_privileges(path: str) -> bool:
    """Whether exec of this file changes privileges, which makes the loader ignore LD_PRELOAD."""
    facts = os.stat(path)
    user, group = os.geteuid(), os.getegid()
    changes = (facts.st_mode & stat.S_ISUID and facts.st_uid != user) or (
        facts.st_mode & stat.S_ISGID and facts.st_mode & stat.S_IXGRP and facts.st_gid != group
    )
    if not changes and user != 0:
        try:
            changes = bool(os.getxattr(path, "security.capability"))
        except OSError:
            changes = False
    return bool(changes) and not os.statvfs(path).f_flag & os.ST_NOSUID and not _has_no_new_privileges()


def _has_no_new_privileges() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return any(line.split() == ["NoNewPrivs:", "1"] for line in status)
