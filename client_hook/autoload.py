"""Opt-in by environment alone: `NVSHARE_ENABLE=1 python train.py`, `NVSHARE_ENABLE=1 jupyter lab`.

Purpose: a library cannot be preloaded into a process that runs already, so the interpreter executes itself once more
with the hook in LD_PRELOAD.  `nvshare_autoload.pth` in site-packages calls `start` at interpreter start, before the
program's first line, and only when NVSHARE_ENABLE is set; whatever this process starts inherits the hook.

Invariants:
- The interpreter is executed again at most once: `NVSHARE_REEXEC` holds the process id, which exec keeps.
- Arguments, descriptors, standard input (of which nothing has been read yet) and working directory stay as they are.
- Nothing that goes wrong here stops the program: one line on stderr, and it goes on without the hook, and so do
  its children, which would all meet the same obstacle.
- A process that is under the hook already pays next to nothing: everything is imported where it is needed.

May not go here: anything that costs time when the variable is not set; that part is the .pth file's one line.
"""

import os
import sys

MARKER = "NVSHARE_REEXEC"
_HOOK = "libnvshare_hook.so"
_OWN_TOOLS = ("nvshare-run", "nvshare-coordinator", "nvshare-ctl", "nvshare-demo")
_OWN_MODULES = (
    "nvshare.coordinator.daemon.main",
    *(f"nvshare.coordinator.cli.{name}" for name in ("run", "ctl", "demo")),
)


def start() -> None:
    """Executes this interpreter again under the hook, unless it is under it, must not be, or cannot be."""
    try:
        _start()
    except Exception as error:  # whatever it is, the user's program matters more
        _go_on_without(str(error) or type(error).__name__)


def _start() -> None:
    if os.environ.pop(MARKER, None) == str(os.getpid()):
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            loaded = _HOOK in maps.read()
        if not loaded:
            _go_on_without(f"the dynamic linker did not load {os.environ.get('LD_PRELOAD', _HOOK)}")
        return
    if os.environ.get("NVSHARE_DISABLE", "0") not in ("", "0") or _HOOK in os.environ.get("LD_PRELOAD", ""):
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
    """The command line of a plain interpreter; None when Python is part of another program, which cannot start anew."""
    with open("/proc/self/cmdline", "rb") as file:
        given = file.read().split(b"\0")[:-1]
    plain = sys.executable and os.path.realpath(sys.executable) == os.readlink("/proc/self/exe")
    if plain and given and given == [os.fsencode(argument) for argument in sys.orig_argv]:
        return given
    _say("this Python is part of another program; start that one through nvshare-run")
    return None


def _is_own_tool(arguments: list[bytes]) -> bool:
    """Our tools are no clients; a coordinator above all must not start another for itself."""
    words = [os.fsdecode(word) for word in arguments[1:]]
    for index, word in enumerate(words):
        if word == "-m":
            return index + 1 < len(words) and words[index + 1] in _OWN_MODULES
        if not word.startswith("-"):
            return os.path.basename(word) in _OWN_TOOLS
    return False


def _go_on_without(reason: str) -> None:
    os.environ["NVSHARE_ENABLE"] = "0"
    _say(f"{' '.join(reason.split())}; going on without the hook")


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"nvshare: {text}\n")
