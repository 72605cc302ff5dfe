"""Every command of the documentation works: shell blocks of README, tutorials and how-to run on simulated GPUs.

A block that cannot run in a test stands in `NOT_RUN` with the reason.  `nvshare-ctl` lines in the text run too.  Every
command line of our tools, also in the reference pages, names options and commands that the real parsers know.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from nvshare.coordinator.cli import run
from nvshare.coordinator.system.temporary_coordinator import temporary_coordinator
from tests.daemon.processes import ctl
from tests.docs.shell_blocks import PAGES, ROOT, SCRIPTS, Block, blocks, name, tool_lines, words
from tests.waiting import eventually

NOT_RUN: Final[Mapping[str, str]] = {
    "python3 -m venv": "installs; `.ci/run` and `python -m tests.first_steps` do it from a clean checkout",
    "charts/install": "needs a registry and a cluster; tests/chart/test_install.py runs it beside doubles",
    "kubectl": "needs a cluster",
    "helm": "needs a cluster; tests/kubernetes/nri starts the containers of one",
    "nvshare-ctl install unit > /etc": "changes the machine; tests/unit/cli/test_manners.py reads the unit",
    "nvshare-ctl install cdi": "changes the machine; tests/containers writes it elsewhere and runs containers",
    "nvidia-ctk": "needs NVIDIA's Container Toolkit",
    "docker": "needs Docker; tests/containers runs Podman and crun",
    "nvshare-ctl kernelspec install": "changes the environment; tests/jupyter runs it in its own",
    "nvshare-coordinator --mps": "needs a card with MPS; its double is in tests/launch/test_mps.py",
    "nvshare-ctl park NOTEBOOK": "parks an idle program; tests/end_to_end/parking does that",
    "python -m nvshare.bench.park": "measures a card; tests/bench/test_benches_run.py runs it on a simulated one",
    "nvshare-ctl migrate": "needs two GPUs; tests/end_to_end/parking does it",
    "install -D -m 755 -t /etc/slurm": "changes the machine; tests/kubernetes/slots/test_slurm.py uses the files",
    "sbatch": "needs Slurm; tests/kubernetes/slots/test_slurm.py runs jobs",
    "/opt/nvshare/bin/pip install": "changes the machine; tests/daemon/test_death_and_recovery.py has a restart",
    "systemctl restart nvshare": "changes the machine; tests/daemon/test_scrape.py reads metrics",
    "pytest": "the tests themselves",
    "nvshare-ctl slot add": "needs root; tests/kubernetes/slots/test_slot_command.py and tests/jupyter/test_hub.py",
}
"""How the first line of a block begins, and why the block is not run."""

RUN_PAGES: Final = [page for page in PAGES if name(page).startswith(("README", "docs/tutorials", "docs/how-to"))]
BUSY: Final = "nvshare.bench.workloads.busy"
PROGRAM: Final = f"from {BUSY} import main\nmain(['--seconds=1'])\n"
SERVER: Final = f"""#!/bin/sh
LD_LIBRARY_PATH="/usr/lib/server:$LD_LIBRARY_PATH" {sys.executable} main.py &
wait
"""
"""Stands in for Ollama and other servers: the program that uses the GPU is a child with a search path of its own."""
STOP_ALL: Final = "trap 'for job in $(jobs -p); do kill -KILL -- -$job || true; done' EXIT"
ELLIPSIS: Final = re.compile(r"\||\.\.\.|\b(?!CLIENT\b)[A-Z]{2,}\b")
"""A pattern or a placeholder, not a command line."""


def reason(block: Block) -> str | None:
    """Why a block is not run, or None."""
    first = next(line for line in block.lines if line and not line.startswith("#"))
    return next((why for begin, why in NOT_RUN.items() if first.startswith(begin)), None)


def runnable(page: Path) -> list[Block]:
    """The blocks of a page that run, in order."""
    return [block for block in blocks(page) if reason(block) is None]


def script(found: list[Block]) -> str:
    """The blocks as one script.  After a command in the background it waits as a reader does, until tools see it."""
    lines = ["set -em -o pipefail", STOP_ALL]
    for line in (line for block in found for line in block.lines):
        lines.append(re.sub(r"\bnvshare-run (?!--simulate)", "nvshare-run --simulate ", line))
        if not line.endswith("&"):
            continue
        given = re.search(r"--name (\S+)", line)
        known = (
            f"nvshare-ctl clients --json 2>&1 | grep -q '{given[1]}'" if given else "nvshare-ctl status >/dev/null 2>&1"
        )
        lines.append(f"for try in $(seq 200); do {known} && break; done; {known}")
    return "\n".join(lines)


@contextlib.contextmanager
def reader(runtime: Path) -> Iterator[dict[str, str]]:
    """The environment of a reader with nvshare installed, beside a coordinator of a simulated GPU."""
    ours = {key for key in os.environ if key.startswith("NVSHARE_") and "LIBRARY" not in key}
    environ = {key: value for key, value in os.environ.items() if key not in ours}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "NVSHARE_RUNTIME_DIR": str(runtime)}
    environ |= {"NVSHARE_MEMORY": "device", "TMPDIR": str(runtime)}
    with temporary_coordinator(runtime, ["--simulate=1x4GiB"], log=runtime / "log"):
        yield environ


@pytest.mark.parametrize("page", [page for page in RUN_PAGES if runnable(page)], ids=name)
def test_commands_run(page: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Broken: a reader types what the page says, and it fails."""
    folder = tmp_path_factory.mktemp("reader")
    for program in ("train.py", "serve.py"):
        (folder / program).write_text(PROGRAM, encoding="utf-8")
    (folder / "main.py").write_text(f"from {BUSY} import main\nmain(['--seconds=240'])\n", encoding="utf-8")
    for program in ("ollama", "llama-server", "vllm"):
        (folder / program).write_text(SERVER, encoding="utf-8")
        (folder / program).chmod(0o755)
    with reader(tmp_path_factory.mktemp("d")) as environ:
        environ["PATH"] += f":{folder}"
        shell = subprocess.Popen(
            ["bash", "-xc", script(runnable(page))], cwd=folder, env=environ, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = shell.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, said[-4000:]


def test_controls_in_the_text_work(tmp_path: Path) -> None:
    """Broken: a `nvshare-ctl` line within the text of a page fails beside a running program named CLIENT."""
    elsewhere = {line for page in RUN_PAGES for block in runnable(page) for line in block.lines}
    lines = dict.fromkeys(
        line
        for page in RUN_PAGES
        for line in tool_lines(page)
        if line.startswith("nvshare-ctl ") and line not in elsewhere and not ELLIPSIS.search(line)
        if reason(Block("", (line,))) is None
    )
    with reader(tmp_path) as environ:
        program = ["nvshare-run", "--simulate", "--name", "CLIENT", "--", sys.executable, "-m", BUSY, "--seconds=240"]
        busy = subprocess.Popen(program, env=environ, executable=shutil.which(program[0], path=environ["PATH"]))
        try:
            eventually(lambda: '"CLIENT"' in control("nvshare-ctl clients --json", tmp_path).stdout, "CLIENT is seen")
            done = {line: control(line, tmp_path) for line in lines}
        finally:
            busy.kill()
            busy.wait()
    named = {line for line, each in done.items() if each.returncode == 2 and "Missing argument" in each.stderr}
    named |= {line for line, each in done.items() if "it wants the GPU" in each.stdout}  # it is busy: not parked
    failed = {line: each.stderr for line, each in done.items() if each.returncode != 0 and line not in named}
    assert not failed, failed
    assert len(done) - len(named) > 12, "most of the lines are whole commands"


def control(line: str, runtime: Path) -> subprocess.CompletedProcess[str]:
    """Runs one `nvshare-ctl` line; `events` ends after the first one."""
    last = ["--count", "1"] if line.startswith("nvshare-ctl events") and "--count" not in line else []
    return ctl(runtime, *shlex.split(line, comments=True)[1:], *last)


def test_reasons_are_needed() -> None:
    """Broken: the list excuses a command that no page has any more."""
    firsts = [block.lines[0] for page in PAGES for block in blocks(page)]
    stale = [begin for begin in NOT_RUN if not any(first.startswith(begin) for first in firsts)]
    assert not stale, stale


@functools.cache
def click_command(tool: str) -> Any:
    """The parser of a tool made with typer."""
    module = import_module(SCRIPTS[tool].split(":")[0])
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    app = typer.Typer()  # nvshare-demo makes its own in `main`
    app.command()(module.demo)
    return typer.main.get_command(app)


def unknown_in(line: str) -> list[str]:
    """The options and commands of a command line that its tool does not know."""
    tool, *rest = words(line)
    if tool == "nvshare-run":
        ours, _ = run.split_command(rest)
        options = set(run.make_parser()._option_string_actions)
        return [word for word in ours if word.startswith("-") and word.partition("=")[0] not in options]
    command, missing = click_command(tool), []
    options = set()
    for word in rest:
        options |= {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        if word == "--":
            break
        if word.startswith("-"):
            if word.partition("=")[0] not in options | {"--help", "-h"}:
                missing.append(word)
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return [word] if re.fullmatch(r"[a-z][a-z-]*", word) else missing
            command = command.commands[word]
    return missing


def test_options_exist() -> None:
    """Broken: a page names an option or a command that does not exist."""
    lines = ((name(page), line) for page in PAGES for line in tool_lines(page))
    wrong = {(page, line): unknown for page, line in lines if (unknown := unknown_in(line))}
    assert not wrong, wrong


def test_modules_exist() -> None:
    """Broken: a page says `python -m` of a module that does not exist."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "bench" / "README.md"))
    named = set(re.findall(r"python -m ((?:nvshare|tests)\.[a-z_.]+[a-z_])", text))
    missing = [module for module in sorted(named) if importlib.util.find_spec(module) is None]
    assert not missing, missing


def test_commands_are_documented() -> None:
    """Broken: an option of `nvshare-run` or a command of `nvshare-ctl` is in no reference page."""
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    options = {option for option in run.make_parser()._option_string_actions if option.startswith("--")} - {"--help"}
    missing = [option for option in sorted(options) if f"`{option}" not in text]
    missing += [
        word for word in click_command("nvshare-ctl").commands if not re.search(rf"`(nvshare-ctl )?{word}\b", text)
    ]
    assert not missing, missing
