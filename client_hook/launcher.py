"""Finds the hook library and makes the environment of a client, for `nvshare-run`, the notebook opt-in and the demo.

Invariants: this module starts no process, opens no socket and writes nothing outside the runtime directory.  It never
changes a given environment.  It imports little, because it runs before every command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvshare.coordinator.model.profile import MEMORY_MODES, PROFILE, Words

HOOK_NAME = "libnvshare_hook.so"
SYSTEM_PRELOAD = "/etc/ld.so.preload"
"""What glibc's loader preloads into every program.  It names the hook in a container with a slot."""
_OF_A_SERVICE = frozenset(("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"))
"""Of the service that a launcher runs in: a coordinator started there is not that service."""
_CLIENT_ONLY = (
    _OF_A_SERVICE
    | {"NVSHARE_SOCKET", "NVSHARE_ENABLE", "NVSHARE_REEXEC", "NVSHARE_PLACEMENT"}
    | {row.variable for row in PROFILE.values()}
)


class LaunchError(Exception):
    """The program cannot run under the hook.  The text has the reason and the remedy."""


def package_root() -> Path:
    """The directory of our packages: `nvshare` in site-packages, or a source checkout."""
    return Path(__file__).resolve().parent.parent


def find_hook(environ: Mapping[str, str]) -> Path:
    """Absolute path of the hook library.

    `NVSHARE_HOOK_LIBRARY` comes first, then the library beside this package, then that of the installed distribution,
    which a source checkout on sys.path hides.  Raises LaunchError.
    """
    named = environ.get("NVSHARE_HOOK_LIBRARY")
    if named:
        path = Path(named).absolute()
        if not path.is_file():
            raise LaunchError(f"NVSHARE_HOOK_LIBRARY names {path}, which does not exist; unset it or correct it")
        return path
    path = package_root() / "client_hook" / "lib" / HOOK_NAME
    if path.is_file():
        return path
    installed = _installed_file(f"nvshare/client_hook/lib/{HOOK_NAME}")
    if installed is None:
        raise LaunchError(
            f"the hook library {HOOK_NAME} is not installed: run `pip install .` in the source tree, "
            "or set NVSHARE_HOOK_LIBRARY to a built one"
        )
    return installed


def _installed_file(name: str) -> Path | None:
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

    try:
        files = distribution("nvshare").files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if str(file) == name:
            path = Path(str(file.locate())).absolute()
            return path if path.is_file() else None
    return None


def preload_entries(value: str) -> list[str]:
    """The entries of an LD_PRELOAD or of its file, separated by white space and colons."""
    return value.replace(":", " ").split()


def _is_hook(entry: str) -> bool:
    return entry.rpartition("/")[2] == HOOK_NAME


def without_hook(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the hook in LD_PRELOAD."""
    others = [entry for entry in preload_entries(environ.get("LD_PRELOAD", "")) if not _is_hook(entry)]
    made = {name: value for name, value in environ.items() if name != "LD_PRELOAD"}
    if others:
        made["LD_PRELOAD"] = ":".join(others)
    return made


def is_in_every_program(file: str = SYSTEM_PRELOAD) -> bool:
    """Whether the loader preloads a hook into every program.  LD_PRELOAD must not add another installation's hook."""
    try:
        with open(file, encoding="utf-8", errors="replace") as preload:
            return any(_is_hook(entry) for entry in preload_entries(preload.read()))
    except OSError:
        return False


def names_hook_for_glibc_alone(environ: Mapping[str, str]) -> bool:
    """Whether only glibc's loader finds the hook that this LD_PRELOAD names."""
    entries = [entry for entry in preload_entries(environ.get("LD_PRELOAD", "")) if _is_hook(entry)]
    return all("$LIB" in entry for entry in entries)


def with_preload(value: str, hook: Path) -> str:
    """`value` with the hook in it once: last, since it calls the driver itself, where others call the next library."""
    return ":".join([*(entry for entry in preload_entries(value) if not _is_hook(entry)), str(hook)])


def preloadable(path: Path, runtime_dir: Path) -> Path:
    """A path of the hook for LD_PRELOAD, without spaces and colons, which separate entries.

    For an installed hook the path has a literal `$LIB`, which only glibc's loader replaces.  Musl's loader
    then finds no hook; with one it would miss glibc's functions and end the program.  A hook on a path with separators
    is linked into the runtime directory.  Raises LaunchError when that path has separators too.
    """
    if not _separates(path) and path.name == HOOK_NAME:
        return _for_glibc_alone(path) or path
    link = runtime_dir / HOOK_NAME
    if _separates(link):
        raise LaunchError(
            f"LD_PRELOAD cannot name '{path}' nor '{link}': spaces and colons separate its entries; "
            "choose a --runtime-dir (or NVSHARE_RUNTIME_DIR) without them"
        )
    try:
        if link.is_symlink() and link.readlink() == path:
            return link
        fresh = link.with_name(f"{HOOK_NAME}.{os.getpid()}")
        fresh.symlink_to(path)
        fresh.replace(link)  # atomic: another program may be using the old link
    except OSError as error:
        raise LaunchError(
            f"LD_PRELOAD cannot name '{path}' (spaces and colons separate its entries), and creating the link {link} "
            f"failed: {error.strerror}; set NVSHARE_HOOK_LIBRARY to a copy elsewhere"
        ) from None
    return link


def _for_glibc_alone(path: Path) -> Path | None:
    """The hook's path with `$LIB`; None unless the file exists for every value of `$LIB` on this machine."""
    if path.parent.name != "lib":
        return None
    root = path.parent.parent
    values = ("lib64", f"lib/{os.uname().machine}-linux-gnu")
    try:
        size = path.stat().st_size
        complete = all((root / value / HOOK_NAME).stat().st_size == size for value in values)
    except OSError:
        return None
    return root / "$LIB" / HOOK_NAME if complete and _libc_lies_in(("lib", *values)) else None


def _libc_lies_in(values: Sequence[str]) -> bool:
    """Whether one of these is `$LIB` of this machine's glibc, that is the end of libc's directory."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = re.search(r"(/\S+)/libc(?:\.so\.6|-2\.[0-9]+\.so)$", maps, re.MULTILINE)
    return found is not None and found[1].endswith(tuple(f"/{value}" for value in values))


def _separates(path: Path) -> bool:
    return " " in str(path) or ":" in str(path)


def client_environment(base: Mapping[str, str], *, hook: Path, runtime_dir: Path, options: Words) -> dict[str, str]:
    """`base` with the variables of a client of the coordinator in `runtime_dir`; `options`: a profile.

    Raises LaunchError when LD_PRELOAD cannot name the hook.
    """
    environ = without_hook(base)
    if not is_in_every_program():
        environ["LD_PRELOAD"] = with_preload(base.get("LD_PRELOAD", ""), preloadable(hook, runtime_dir))
    sanitizer = base.get("ASAN_OPTIONS", "")
    if "verify_asan_link_order" not in sanitizer:  # AddressSanitizer may come after the hook
        environ["ASAN_OPTIONS"] = f"{sanitizer}:verify_asan_link_order=0".lstrip(":")
    environ["NVSHARE_RUNTIME_DIR"] = str(runtime_dir)
    environ["NVSHARE_SOCKET"] = str(runtime_dir / "hooks.sock")
    environ.update({PROFILE[word].variable: text for word, text in options.items()})
    environ.pop("NVSHARE_REEXEC", None)
    return environ


def check_memory_mode(mode: str) -> None:
    """Raises LaunchError for an unknown memory mode."""
    if mode not in MEMORY_MODES:
        raise LaunchError(f"unknown memory mode {mode!r}; use {' or '.join(MEMORY_MODES)}")


def coordinator_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a coordinator: without the variables of clients, and with the path of a source checkout.

    PYTHONPATH stays only where it has that path, as in `coordinator/search_path.py`.
    """
    environ = {name: value for name, value in without_hook(base).items() if name not in _CLIENT_ONLY}
    root = package_root()
    if (root / "nvshare").is_dir():  # a source checkout
        given = base.get("PYTHONPATH", "")
        environ["PYTHONPATH"] = given if str(root) in given.split(os.pathsep) else str(root)
    return environ
