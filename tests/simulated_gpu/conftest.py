"""Programs on simulated GPUs: each test has its own state file, and each program is a process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

HERE = Path(__file__).parent
INSTANT = {"NVSHARE_SIM_COPY_GIBPS": "0"}  # copies take no time
PREAMBLE = "import os, sys, threading\nfrom sim_driver import *\n"


class Program(subprocess.Popen[str]):
    """A program whose three streams are pipes to the test."""

    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]


Start = Callable[..., Program]
Run = Callable[..., str]


@pytest.fixture
def start(sim_env: dict[str, str]) -> Iterator[Start]:
    """Starts a program (Python source that finds `Driver`), by the command `by`; it is killed when the test ends."""
    running: list[Program] = []

    def starter(source: str, by: Sequence[str] = (), **environment: str) -> Program:
        process = Program(
            [*by, sys.executable, "-c", PREAMBLE + textwrap.dedent(source)],
            env={**sim_env, **INSTANT, "PYTHONPATH": str(HERE), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield starter
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def run(start: Start) -> Run:
    """Runs a program to its end and returns its output; it must exit with 0."""

    def runner(source: str, **environment: str) -> str:
        process = start(source, **environment)
        output, errors = process.communicate()
        assert process.returncode == 0, f"exit code {process.returncode}\n{output}\n{errors}"
        return output

    return runner


@pytest.fixture
def state(sim_env: dict[str, str]) -> Path:
    """The state file of this test's cards."""
    return Path(sim_env["NVSHARE_SIM_STATE"])
