"""The remedy for packages that are not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from nvshare.coordinator.system import checkpoints
from nvshare.coordinator.system.extras import install_command

DECLARED = ["pydantic>=2", "starlette<2,>=1; extra == 'web'", 'uvicorn>=0.30;extra == "web"', "x; extra == 'webby'"]


def test_a_remedy_installs_packages_beside_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the remedy names a distribution that no index has, or installs into another Python."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: DECLARED)
    command = shlex.split(install_command("web"))
    assert command == [sys.executable, "-m", "pip", "install", "starlette<2,>=1", "uvicorn>=0.30"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert install_command("web").startswith(f"uv pip install --python {sys.executable} ")


def test_a_checkout_that_is_not_installed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a program that runs from a checkout ends with a traceback instead of a remedy."""

    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_command("web").endswith("pip install '.[web]'")


@pytest.mark.parametrize("missing", ["cuda", "cuda.core", "cuda.bindings"])
def test_parking_needs_all_its_packages(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the doctor is content, and every parking fails."""

    def find(name: str) -> Any:
        return None if name == missing else name

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert checkpoints.cannot_park() == checkpoints.EXTRA
