"""`nvshare-run`: runs one command under the hook, and starts a coordinator if none runs.

The command replaces this process by exec, so exit code, signals, terminal and job control are its own.

Exit codes: 2 wrong command line, 1 failed set-up, 127 command not found, 126 command not executable.
Imports nothing slow, because this runs before every command; hence argparse.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
import argparse
import errno
import os
import re
import shutil
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a traceback, also during imports

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from nvshare.client_hook.embedded import Launch, prepare_client
from nvshare.client_hook.launcher import (
    JOB_CLASSES,
    MEMORY_MODES,
    ClientOptions,
    LaunchError,
    names_hook_for_glibc_alone,
    without_hook,
)
from nvshare.client_hook.obstacles import find_obstacle
from nvshare.coordinator.units import parse_duration, parse_duration_or_never, parse_part, parse_size

_WITH_VALUE = (
    "--memory", "--priority", "--weight", "--gang", "--class", "--share-request", "--share-limit", "--deadline",
    "--park-after", "--name", "--gpu-memory-limit", "--gpu", "--with", "--apart", "--runtime-dir",
)  # fmt: skip
_NAME_BYTES = 63
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point.  Executes the command, or exits."""
    ours, command = split_command(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    options = _parse(parser, ours)
    if not command or not command[0]:
        parser.error("no command; write: nvshare-run [options] -- COMMAND [argument...]")
    if options.simulate == "" and re.fullmatch(r"[0-9]+(x[0-9.]+[A-Za-z]*)?", command[0]):
        parser.error(f"write --simulate={command[0]}, with an equals sign")
    note_environment(command[0])
    try:
        environ = _prepare(options, dict(os.environ), command[0])
        if options.gpu or options.beside or options.apart or options.alone:
            from nvshare.coordinator.cli.gpu_option import with_gpus  # imports ZeroMQ

            environ = with_gpus(environ, options, command)
    except LaunchError as error:
        sys.stderr.write(f"nvshare-run: {error}\n")
        raise SystemExit(1) from None
    raise SystemExit(_become(command, environ))


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The options.  An unknown one ends the program, with the nearest known one."""
    options, unknown = parser.parse_known_args(words)
    if unknown:
        import difflib  # slow

        name = unknown[0].partition("=")[0]
        known = [text for action in parser._actions for text in action.option_strings]
        near = difflib.get_close_matches(name, known, 1)
        parser.error(f"no such option: {name}" + (f"; did you mean {near[0]}?" if near else "; see nvshare-run --help"))
    return options


class _Version(argparse.Action):
    """Prints the version; slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from nvshare.coordinator.system.version import version

        sys.stdout.write(f"nvshare-run {version()}\n")
        parser.exit()


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command: the words after `--`, or from the first word that is not an option."""
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if not word.startswith("-"):
            break
        index += 2 if word in _WITH_VALUE else 1
    return list(argv[:index]), list(argv[index:])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nvshare-run",
        usage="nvshare-run [options] -- COMMAND [argument...]",
        description="Run a command as a client of the GPU coordinator, which is started if none runs.",
        epilog="The command replaces nvshare-run, so exit code, signals and terminal are its own. "
        "A warning names programs that cannot load the hook (musl, static, setuid).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--memory",
        choices=MEMORY_MODES,
        metavar="auto|swap|managed|device",
        help="kind of device allocations; auto: swap where the GPU can, else managed (auto)",
    )
    parser.add_argument(
        "--priority", type=_priority, metavar="N", help="higher runs first, under the policy priority (0)"
    )
    parser.add_argument(
        "--weight", type=_weight, metavar="N", help="1 to 10000: share of time under the policy fair_share (1)"
    )
    parser.add_argument(
        "--gang",
        type=_name,
        metavar="NAME",
        help="run at the same time as the user's other programs of this gang, each on its GPU",
    )
    parser.add_argument(
        "--class",
        dest="job_class",
        choices=JOB_CLASSES,
        metavar="batch|interactive|best-effort",
        help="interactive: someone waits for it; best-effort: runs in what others leave (batch)",
    )
    parser.add_argument(
        "--share-request", type=_share, metavar="S", help="guaranteed share of the GPU's time: 0.3 or 30%%"
    )
    parser.add_argument("--share-limit", type=_share, metavar="S", help="largest share, also when alone (1)")
    parser.add_argument(
        "--deadline", type=_deadline, metavar="TIME", help="when it should be done, from its start: 90s, 30m, 2h"
    )
    parser.add_argument(
        "--park-after",
        type=_park_after,
        metavar="TIME",
        help="leave the GPU altogether after this time without use of it: 10m, 2h; 0: never (as set for its class)",
    )
    parser.add_argument("--name", type=_name, metavar="S", help="name shown by tools (script or program)")
    parser.add_argument("--gpu-memory-limit", type=_size, metavar="SIZE", help="largest allocation in all: 4GiB")
    _add_gpus(parser)
    parser.add_argument(
        "--simulate",
        nargs="?",
        const="",
        metavar="GPUS[xCAPACITY]",
        help="run on simulated GPUs, shared by all commands of the runtime directory: --simulate=2x8GiB",
    )
    _add_others(parser)
    return parser


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    """Options that choose the GPUs; each of the wishes alone means `--gpu auto` too."""
    parser.add_argument(
        "--gpu",
        type=_gpus,
        metavar="auto[:N]|LIST",
        help="N GPUs that the coordinator chooses, or these: 0,1 as nvidia-smi numbers them, or UUIDs",
    )
    parser.add_argument("--with", dest="beside", type=_name, metavar="NAME", help="on a GPU where NAME runs")
    parser.add_argument("--apart", type=_name, metavar="NAME", help="on a GPU where no program NAME runs or comes")
    parser.add_argument("--alone", action="store_true", help="on a GPU where no other program runs or is placed")
    parser.add_argument("--wait", action="store_true", help="wait until there is such a GPU")


def _gpus(text: str) -> str:
    gpu = r"((GPU|MIG)-[0-9A-Za-z/-]+|[0-9]{1,3})"
    if re.fullmatch(rf"auto(:([1-9]|[12][0-9]|3[0-2]))?|{gpu}(,{gpu})*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no choice of GPUs: write auto, auto:2, 0,1 or UUIDs")


def _add_others(parser: argparse.ArgumentParser) -> None:
    """Options that do not describe the program."""
    parser.add_argument("--no-mps", action="store_true", help="run outside the coordinator's MPS, where it has one")
    parser.add_argument("--runtime-dir", metavar="DIR", help="runtime directory of the coordinator")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")


def _priority(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not -(1 << 31) <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range: 32 bits")
    return value


def _weight(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10000")
    return int(text)


def _name(text: str) -> str:
    if not text or len(os.fsencode(text)) > _NAME_BYTES:
        raise argparse.ArgumentTypeError(f"a name has 1 to {_NAME_BYTES} bytes")
    return text


def _by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser of units for argparse."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


_size, _share = _by(parse_size), _by(lambda text: parse_part(text, 0.001))
_deadline = _by(lambda text: parse_duration(f"{text}s" if text.isdecimal() else text))
_park_after = _by(parse_duration_or_never)


def _prepare(options: argparse.Namespace, environ: dict[str, str], program: str) -> dict[str, str]:
    """Starts the coordinator if none runs, and returns the environment of the program."""
    launch = Launch(
        runtime_dir=options.runtime_dir,
        simulate=options.simulate,
        options=ClientOptions(
            memory=options.memory,
            priority=options.priority,
            weight=options.weight,
            gang=options.gang,
            job_class=options.job_class,
            share_request=options.share_request,
            share_limit=options.share_limit,
            deadline_ns=options.deadline,
            park_after_ns=options.park_after,
            name=options.name,
            memory_limit_bytes=options.gpu_memory_limit,
        ),
        program=program,
        mps=not options.no_mps,
    )
    return prepare_client(launch, environ)


def note_environment(program: str) -> None:
    """Says that NVSHARE_ENABLE alone would have no effect on a Python without nvshare."""
    if os.environ.get("NVSHARE_ENABLE", "0") in ("", "0"):
        return
    from nvshare.client_hook.python_environment import environment_without_nvshare

    path = shutil.which(program)
    if path is not None and (without := environment_without_nvshare(path)) is not None:
        sys.stderr.write(
            f"nvshare-run: nvshare is not installed in {without}, so NVSHARE_ENABLE=1 alone has no effect there; "
            "nvshare-run loads the hook itself\n"
        )


def _become(command: list[str], environ: dict[str, str]) -> int:
    """Replaces this process by the command.  After a failure, returns the exit code that a shell would give."""
    environ = _warn_of_obstacles(command[0], environ)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these signals, and exec would keep that
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        if error.errno == errno.ENOEXEC and (script := shutil.which(command[0], path=environ.get("PATH"))):
            os.execve("/bin/sh", ["/bin/sh", script, *command[1:]], environ)  # no #! line: as execvp(3) does
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        reason = error.strerror
        if missing:
            there = shutil.which(command[0], path=environ.get("PATH")) is not None
            reason = "its interpreter or loader does not exist" if there else "command not found"
        sys.stderr.write(f"nvshare-run: {command[0]}: {reason}\n")
        return 127 if missing else 126


def _warn_of_obstacles(program: str, environ: dict[str, str]) -> dict[str, str]:
    """Warns if the program cannot load the hook, and returns an environment in which it still runs."""
    path = shutil.which(program, path=environ.get("PATH"))
    obstacle = find_obstacle(path) if path is not None else None
    if obstacle is None:
        return environ
    sys.stderr.write(f"nvshare-run: {obstacle.text}\n")
    return without_hook(environ) if obstacle.deadly and not names_hook_for_glibc_alone(environ) else environ


if __name__ == "__main__":
    main()
