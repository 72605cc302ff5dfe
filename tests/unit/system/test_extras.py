"""The remedy for packages that are not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
from importlib.metadata import PackageNotFoundError

import pytest

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
