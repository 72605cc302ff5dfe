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

from nvshare.client_hook.embedded import Launch, prepare_client
from nvshare.client_hook.launcher import LaunchError, names_hook_for_glibc_alone, without_hook
from nvshare.client_hook.obstacles import find_obstacle
from nvshare.coordinator.model.profile import PROFILE, ProgramSetting


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
    with_value = {"--gpu", "--with", "--apart", "--runtime-dir", *(row.option for row in PROFILE.values())}
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if not word.startswith("-"):
            break
        index += 2 if word in with_value else 1
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
    for row in PROFILE.values():
        shown = row.help.replace("%", "%%")
        parser.add_argument(row.option, dest=row.word, type=_reader(row), metavar=row.metavar, help=shown)
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


def profile_of(options: argparse.Namespace) -> dict[str, str]:
    """The profile that the options say."""
    return {word: text for word in PROFILE if (text := getattr(options, word)) is not None}


def _reader(row: ProgramSetting) -> Callable[[str], str]:
    """A setting of the program for argparse: the text for its variable."""

    def read(text: str) -> str:
        try:
            value = row.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return str(value) if row.of_hook else text

    return read


def _name(text: str) -> str:
    return _reader(PROFILE["name"])(text)


def _prepare(options: argparse.Namespace, environ: dict[str, str], program: str) -> dict[str, str]:
    """Starts the coordinator if none runs, and returns the environment of the program."""
    launch = Launch(
        runtime_dir=options.runtime_dir,
        simulate=options.simulate,
        options=profile_of(options),
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
