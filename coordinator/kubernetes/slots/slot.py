"""A slot: the right of one container or job to share GPUs, and its directory on the node.

A container mounts DIR/<slot>/ read-only.  It holds `slot.json`, which the device plugin or `nvshare-ctl slot add`
writes, and `hooks.sock`, on which the coordinator listens.  The socket is the identity: no other container can reach
it, and with `user_id` no other user.

Invariants: a slot's name is a safe file name and fits into a socket path.  `slot.json` is replaced atomically.  Files
are validated and bounded in size.

Non-goals: gRPC, sockets, scheduling.  The coordinator imports this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nvshare.coordinator.model import profile
from nvshare.coordinator.system.runtime_dir import MAX_SOCKET_PATH_BYTES

log: Final = logging.getLogger("nvshare")

SLOT_FILE: Final = "slot.json"
SOCKET_FILE: Final = "hooks.sock"
HOOK_REGISTERED_FILE: Final = ".hook-registered"
"""Holds the allocation whose hook has registered, for a restarted coordinator."""
MAX_NAME_BYTES: Final = 56
"""A UUID of a GPU or MIG instance has 40 bytes; the rest is the slot's number."""
MAX_FILE_BYTES: Final = 65_536
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

Label = Annotated[str, Field(min_length=1, max_length=253)]


class SlotError(Exception):
    """A slot or its directory is unusable; the text says why."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class PodRef(_Record):
    """The container that has the slot."""

    namespace: Label
    name: Label
    container: Label


class Slot(_Record):
    """`slot.json`."""

    slot: Label
    allocation: Label
    """Random; new at each Allocate, to tell successive owners of a slot apart."""
    allocated_at_s: float = Field(ge=0)
    gpus: tuple[Label, ...] = Field(min_length=1, max_length=64)
    device_ids: tuple[Label, ...] = Field(min_length=1, max_length=1024)
    library: str = ""
    """Directory name of the mounted hook version; empty: unknown."""
    user_id: int | None = Field(default=None, ge=0)
    """The only user who may connect, besides root; None: everybody who reaches the socket."""
    policy: dict[str, str] = {}
    """Words of model/profile.py, by the pod's annotations or `nvshare-ctl slot add`."""
    pod: PodRef | None = None
    hook_missing: str = ""
    """Why the container runs without the hook; empty: it was given the hook."""

    @property
    def limit_bytes(self) -> int:
        """Limit of all its processes together on each GPU; 0: none."""
        return int(profile.read(self.policy)[0].get("limit_bytes", 0))

    @field_validator("policy", mode="before")
    @classmethod
    def _words(cls, policy: object) -> dict[str, str]:
        """Known words with their values; a newer or an older plugin may know others."""
        found = policy if isinstance(policy, dict) else {}
        known = {row.word: str(found[row.word]) for row in profile.of_slots() if found.get(row.word) is not None}
        for word, why in profile.read(known)[1].items():
            if word != "class":  # of an earlier plugin, which is replaced soon
                raise ValueError(f"{word}: {why}")
            del known[word]
        return known


def check_name(name: str) -> str:
    """The name, if it is a valid slot name; raises SlotError."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_BYTES:
        raise SlotError(f"{name!r} cannot be a slot: letters, digits, '_.-', at most {MAX_NAME_BYTES}")
    return name


def name_for(device_id: str) -> str:
    """The slot name of a kubelet's device id (`GPU-...::3`); LD_PRELOAD allows no colon in a path."""
    return check_name(device_id.replace("::", "--").replace("/", "_"))


def prepare(directory: Path) -> None:
    """Creates the directory of slots; checks its owner, its mode and the length of socket paths.  Raises SlotError."""
    longest = len(os.fsencode(directory.absolute() / ("x" * MAX_NAME_BYTES) / SOCKET_FILE))
    if longest > MAX_SOCKET_PATH_BYTES:
        raise SlotError(
            f"{directory}: too long: a socket path has at most {MAX_SOCKET_PATH_BYTES} bytes and a slot's has "
            f"{longest}; choose a shorter --slots-dir"
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o711)
            directory.chmod(0o711)  # whatever the umask
        found = directory.stat()
    except OSError as error:
        raise SlotError(f"{directory}: {error.strerror}; choose another --slots-dir") from None
    if not directory.is_dir():
        raise SlotError(f"{directory}: not a directory; choose another --slots-dir")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise SlotError(
            f"{directory}: must belong to user {os.geteuid()} and be writable by nobody else (it belongs to "
            f"{found.st_uid}, mode {found.st_mode & 0o777:o}); coordinator and device plugin run as the same user"
        )


def read(directory: Path) -> Slot | None:
    """The slot of this directory; None if there is none.  Raises SlotError for an invalid file."""
    path = directory / SLOT_FILE
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SlotError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise SlotError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    try:
        slot = Slot.model_validate_json(content)
    except ValidationError as error:
        detail = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in detail["loc"]) or "content"
        raise SlotError(f"{path}: {field}: {detail['msg']}") from None
    if slot.slot != directory.name:
        raise SlotError(f"{path}: slot: is {slot.slot!r}, but the directory is {directory.name!r}")
    return slot


def write(directory: Path, slot: Slot) -> None:
    """Creates or replaces DIR/<slot>/slot.json; a new directory appears complete.  Raises OSError."""
    check_name(slot.slot)
    content = slot.model_dump_json(exclude_none=True).encode()
    place = directory / slot.slot
    if not place.is_dir():
        directory.mkdir(mode=0o711, exist_ok=True)
        fresh = directory / f".{slot.slot}.new"
        fresh.mkdir(mode=0o755, exist_ok=True)
        fresh.chmod(0o755)  # containers of other users read it
        _put(fresh / SLOT_FILE, content)
        fresh.rename(place)
        return
    replace_file(place / SLOT_FILE, content)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces or creates a file at once.  Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    _put(temporary, content)
    temporary.rename(path)


def _put(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)
        file.write(content)


def hook_registered(directory: Path, slot: Slot) -> bool:
    """Whether a hook of this allocation has registered."""
    try:
        return (directory / slot.slot / HOOK_REGISTERED_FILE).read_text() == slot.allocation
    except (OSError, UnicodeDecodeError):
        return False


def note_hook_registered(directory: Path, slot: Slot) -> None:
    """Records that a hook of this allocation has registered."""
    try:
        (directory / slot.slot / HOOK_REGISTERED_FILE).write_text(slot.allocation)
    except OSError as error:
        log.warning("slot %s: %s", slot.slot, error)


def read_all(directory: Path) -> dict[str, Slot]:
    """All valid slots, by name."""
    found: dict[str, Slot] = {}
    with contextlib.suppress(OSError):
        for place in sorted(directory.iterdir()):
            if place.name.startswith("."):
                continue
            with contextlib.suppress(SlotError, NotADirectoryError):
                slot = read(place)
                if slot is not None:
                    found[slot.slot] = slot
    return found


def remove(directory: Path, name: str) -> None:
    """Removes a slot.  Remaining processes of it keep their connections."""
    going = directory / f".{check_name(name)}.gone"
    shutil.rmtree(going, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        (directory / name).rename(going)  # rename first: the coordinator may be creating its socket
    shutil.rmtree(going, ignore_errors=True)
