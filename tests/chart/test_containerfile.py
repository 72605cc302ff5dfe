"""The image's recipe, as far as it can be judged where no image can be built.

Non-goals: the library's own symbols (tests/test_cuda_api.py), which the recipe checks again in the image.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.chart.conftest import render
from tests.chart.test_matrix import MATRIX, pods
from tests.conftest import ROOT

TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
LINES = [line for line in TEXT.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def test_hadolint_finds_nothing() -> None:
    """The usual mistakes: unpinned bases, shells without pipefail, caches in layers."""
    beside = Path(sys.executable).with_name("hadolint")
    found = str(beside) if beside.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is missing: it comes with the test extra on x86-64")
    words = [found, "--failure-threshold", "style", str(ROOT / "Containerfile")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bases_are_pinned_by_digest() -> None:
    """A tag is what somebody else makes of it tomorrow."""
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", TEXT, re.MULTILINE))
    stages: set[str] = set()
    for line in LINES:
        if not line.startswith("FROM "):
            continue
        base, *name = re.fullmatch(r"FROM (\S+)(?: AS (\w+))?", line).groups()  # type: ignore[union-attr]
        if base not in stages:
            image = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
            assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image
        stages |= set(filter(None, name))
    assert "manylinux_2_28" in arguments["BUILD_IMAGE"], "the hook must be built on glibc 2.28"


def test_it_is_not_root() -> None:
    """The sidecar says runAsNonRoot, which a kubelet checks against the image's numeric user."""
    users = [line.split()[1] for line in LINES if line.startswith("USER ")]
    assert users[-1] == "65532:65532"
    assert LINES.index(f"USER {users[-1]}") > max(
        i for i, line in enumerate(LINES) if line.startswith(("FROM", "COPY", "RUN"))
    )


def test_it_has_every_program_of_the_chart() -> None:
    """A command that the image lacks is a container that never starts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = {
        container["command"][0]
        for values in MATRIX.values()
        for pod in pods(render(values))
        for container in (*pod.get("initContainers", []), *pod["containers"])
    }
    assert commands == {
        "nvshare-coordinator",
        "nvshare-device-plugin",
        "nvshare-install-library",
        "nvshare-nri",
        "nvshare-dra",
    }
    assert commands <= set(project["scripts"])
    (named,) = re.findall(r"\[([\w,]+)\]\"", TEXT)
    extras = set(named.split(","))
    assert extras <= set(project["optional-dependencies"])


def test_the_context_holds_what_is_built() -> None:
    """A file that is ignored cannot be copied: the wheel needs its sources, its README and its licence."""
    ignored = {line.strip() for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {*project["tool"]["scikit-build"]["wheel"]["packages"], project["project"]["readme"], "LICENSE"}
    needed |= {"CMakeLists.txt", "pyproject.toml"}
    assert not needed & ignored
    assert all((ROOT / name).exists() for name in needed)
