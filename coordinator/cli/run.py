"""`nvshare-run`: puts one command under the hook, starts a coordinator for it if none runs, and becomes the command.

Purpose: the shortest way from an unmodified program to a shared GPU.  The command replaces this process by exec, so
that its exit code, signals, terminal and job control are its own.

With --verify it cannot: then the command is a child, and a report follows (client_hook/verify.py).

Exit codes of our own: 2 for a wrong command line, 1 when the set-up fails, 3 as --verify has it, 127 for a command that
is not found, 126 for one that cannot be executed (as a shell has them).

May not go here: anything slow to import; this runs before every command.  That is why argparse reads the command line.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence

from nvshare.client_hook.embedded import Launch, prepare_client
from nvshare.client_hook.launcher import (
    MEMORY_MODES,
    ClientOptions,
    LaunchError,
    names_hook_for_glibc_alone,
    without_hook,
)
from nvshare.client_hook.obstacles import find_obstacle
from nvshare.coordinator.units import parse_size

_WITH_VALUE = ("--memory", "--priority", "--weight", "--gang", "--name", "--gpu-memory-limit", "--runtime-dir")
_NAME_BYTES = 63


def main(argv: Sequence[str] | None = None) -> None:
    """Never returns: the command, or an exit code."""
    ours, command = split_command(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(ours)
    if not command:
        parser.error("no command; write: nvshare-run [options] -- COMMAND [argument...]")
    if options.simulate == "" and re.fullmatch(r"[0-9]+(x[0-9.]+[A-Za-z]*)?", command[0]):
        parser.error(f"write --simulate={command[0]}, with an equals sign")
    try:
        environ = _prepare(options, dict(os.environ))
        if options.verify is not None:
            from nvshare.client_hook.verify import run_verified  # slow to import, as what it measures is

            raise SystemExit(run_verified(environ, lambda watched: _become(command, watched), options.verify))
    except LaunchError as error:
        sys.stderr.write(f"nvshare-run: {error}\n")
        raise SystemExit(1) from None
    raise SystemExit(_become(command, environ))


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command: what follows `--`, or begins with the first word that is no option of ours."""
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if not word.startswith("-"):
            break
        index += 2 if word in _WITH_VALUE else 1
    return list(argv[:index]), list(argv[index:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nvshare-run",
        usage="nvshare-run [options] -- COMMAND [argument...]",
        description="Run a command as a client of this user's GPU coordinator; one is started if none runs.",
        epilog="The command replaces nvshare-run: exit code, signals and terminal are its own. "
        "With --verify it is a child of it. Where the hook cannot get into it (musl, static, setuid), a line says so.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--memory", choices=MEMORY_MODES, metavar="managed|swap|device", help="what device allocations become (managed)"
    )
    parser.add_argument(
        "--priority", type=_priority, metavar="N", help="higher runs first, under a policy that knows it (0)"
    )
    parser.add_argument(
        "--weight", type=_weight, metavar="N", help="1 to 10000: its part of the time under the policy fair_share (1)"
    )
    parser.add_argument(
        "--gang",
        type=_name,
        metavar="NAME",
        help="programs of yours with the same gang run at the same time, each on its GPU; so do a program's own GPUs",
    )
    parser.add_argument("--name", type=_name, metavar="S", help="how tools show it (the program's name)")
    parser.add_argument("--gpu-memory-limit", type=_size, metavar="SIZE", help="such as 4GiB: more is out of memory")
    parser.add_argument(
        "--simulate",
        nargs="?",
        const="",
        metavar="GPUS[xCAPACITY]",
        help="run on simulated GPUs, shared by all commands of the runtime directory: --simulate=2x8GiB",
    )
    parser.add_argument("--runtime-dir", metavar="DIR", help="where the coordinator is, or is to be")
    parser.add_argument(
        "--verify",
        nargs="?",
        const="",
        metavar="FILE",
        help="tell which kernels and copies escaped the gate (needs CUPTI; slower), also in JSON to "
        "--verify=FILE; the exit code is 3 when the command succeeded and some did",
    )
    return parser


def _priority(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if not -(1 << 31) <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range: 32 bits")
    return value


def _weight(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 10000")
    return int(text)


def _name(text: str) -> str:
    if not text or len(os.fsencode(text)) > _NAME_BYTES:
        raise argparse.ArgumentTypeError(f"a name has 1 to {_NAME_BYTES} bytes")
    return text


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _prepare(options: argparse.Namespace, environ: dict[str, str]) -> dict[str, str]:
    """The command's environment; the coordinator runs and stays."""
    launch = Launch(
        runtime_dir=options.runtime_dir,
        simulate=options.simulate,
        options=ClientOptions(
            memory=options.memory,
            priority=options.priority,
            weight=options.weight,
            gang=options.gang,
            name=options.name,
            memory_limit_bytes=options.gpu_memory_limit,
        ),
    )
    return prepare_client(launch, environ)


def _become(command: list[str], environ: dict[str, str]) -> int:
    """Replaces this process by the command; returns only with a shell's exit code for why it could not."""
    environ = _told_of_obstacles(command[0], environ)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec would hand that on
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        if error.errno == errno.ENOEXEC and (script := shutil.which(command[0], path=environ.get("PATH"))):
            os.execve("/bin/sh", ["/bin/sh", script, *command[1:]], environ)  # no #! line: as execvp(3) has it
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        reason = error.strerror
        if missing:
            there = shutil.which(command[0], path=environ.get("PATH")) is not None
            reason = "its interpreter or loader does not exist" if there else "command not found"
        sys.stderr.write(f"nvshare-run: {command[0]}: {reason}\n")
        return 127 if missing else 126


def _told_of_obstacles(program: str, environ: dict[str, str]) -> dict[str, str]:
    """Says why the hook will not be in the program, if so; the environment in which that does no harm."""
    path = shutil.which(program, path=environ.get("PATH"))
    obstacle = find_obstacle(path) if path is not None else None
    if obstacle is None:
        return environ
    sys.stderr.write(f"nvshare-run: {obstacle.text}\n")
    return without_hook(environ) if obstacle.deadly and not names_hook_for_glibc_alone(environ) else environ


if __name__ == "__main__":
    main()
