"""Opt-in by environment: `NVSHARE_ENABLE=1 python train.py`, `NVSHARE_ENABLE=1 jupyter lab`.

A library cannot be preloaded into a running process, so the interpreter executes itself again with the hook in
LD_PRELOAD.  `nvshare_autoload.pth` in site-packages calls `start` before the program's first line if NVSHARE_ENABLE is
set.  Child processes inherit the hook.

Invariants:
- The interpreter is executed again at most once: `NVSHARE_REEXEC` holds the process id, which exec keeps.
- Arguments, descriptors, unread standard input and working directory stay unchanged.
- A failure prints one line on stderr.  The program and its children then run without the hook.
- A process already under the hook pays almost nothing: imports happen where they are needed.
"""

import os
import sys

MARKER = "NVSHARE_REEXEC"
refusal = ""
"""Why this interpreter runs without the hook though NVSHARE_ENABLE asked for it."""
_HOOK = "libnvshare_hook.so"
_OWN_TOOLS = ("nvshare-run", "nvshare-coordinator", "nvshare-ctl", "nvshare-demo")
_OWN_MODULES = (
    "nvshare.coordinator.daemon.main",
    *(f"nvshare.coordinator.cli.{name}" for name in ("run", "ctl", "demo")),
)


def start() -> None:
    """Executes this interpreter again under the hook, unless it is hooked, disabled, or not possible."""
    try:
        _start()
    except Exception as error:  # the user's program must run in any case
        _continue_without(str(error) or type(error).__name__)


def _start() -> None:
    executed_again = os.environ.pop(MARKER, None) == str(os.getpid())
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = _HOOK in maps.read()
    if executed_again and not loaded:
        _continue_without(f"the dynamic linker did not load {os.environ.get('LD_PRELOAD', _HOOK)}")
    if executed_again or loaded or os.environ.get("NVSHARE_DISABLE", "0") not in ("", "0"):
        return
    arguments = _arguments()
    if arguments is None or _is_own_tool(arguments):
        return
    from nvshare.client_hook.embedded import Launch, prepare_client
    from nvshare.client_hook.obstacles import find_obstacle

    obstacle = find_obstacle(os.readlink("/proc/self/exe"))
    if obstacle is not None:
        raise RuntimeError(obstacle.text)
    environ = prepare_client(Launch(), os.environ)
    environ[MARKER] = str(os.getpid())
    os.execve(os.readlink("/proc/self/exe"), arguments, environ)


def _arguments() -> list[bytes] | None:
    """The command line of a plain interpreter; None when Python is embedded in another program."""
    with open("/proc/self/cmdline", "rb") as file:
        given = file.read().split(b"\0")[:-1]
    plain = sys.executable and os.path.realpath(sys.executable) == os.readlink("/proc/self/exe")
    if plain and given and given == [os.fsencode(argument) for argument in sys.orig_argv]:
        return given
    _say("this Python is part of another program; start that program with nvshare-run")
    return None


def _is_own_tool(arguments: list[bytes]) -> bool:
    """Whether this is one of our tools, which are not clients; a coordinator must not start another one."""
    words = [os.fsdecode(word) for word in arguments[1:]]
    for index, word in enumerate(words):
        if word == "-m":
            return index + 1 < len(words) and words[index + 1] in _OWN_MODULES
        if not word.startswith("-"):
            return os.path.basename(word) in _OWN_TOOLS
    return False


def _continue_without(reason: str) -> None:
    global refusal
    os.environ["NVSHARE_ENABLE"] = "0"
    refusal = " ".join(reason.split())
    _say(f"{refusal}; continuing without the hook")


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"nvshare: {text}\n")
