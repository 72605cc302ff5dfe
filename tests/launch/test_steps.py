"""`nvshare.on_pressure` and `nvshare.step` without the hook, and the ready callbacks."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import cffi
import pytest

import nvshare
from nvshare.client_hook import api, steps


def test_without_the_hook_nothing_is_called() -> None:
    """Broken: a program that runs without nvshare too fails there, or frees its caches for nobody."""
    called: list[int] = []
    nvshare.on_pressure(lambda: called.append(1))
    nvshare.step()
    steps.between_cells()
    assert called == []


def test_an_older_hook_knows_no_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a new program on a node with an older hook fails at its first step."""
    counted: list[int] = []
    older = SimpleNamespace(nvshare_step=lambda: counted.append(1))
    monkeypatch.setattr(api, "hook", lambda: (cffi.FFI(), older))
    nvshare.on_pressure(lambda: counted.append(2))
    nvshare.step()
    assert counted == [1]


def test_importing_the_package_is_cheap() -> None:
    """Broken: the re-exports make each start of a Python program load cffi."""
    program = "import nvshare, sys; print({'cffi', 'nvshare.client_hook.steps'} & sys.modules.keys()); nvshare.step()"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
    with pytest.raises(AttributeError, match="no attribute 'stop'"):
        _ = nvshare.stop  # type: ignore[attr-defined]


def fake_torch(*, initialized: bool, freed: list[str], error: Exception | None = None) -> Any:
    """What the callback uses of PyTorch."""

    def empty_cache() -> None:
        if error is not None:
            raise error
        freed.append("torch")

    return SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: initialized, empty_cache=empty_cache))


def test_pytorchs_cache_is_emptied_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the callback initialises CUDA, which a forked worker cannot do, or fails in a half-loaded library."""
    freed: list[str] = []
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert steps.release_caches() == []
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=False, freed=freed))
    assert (steps.release_caches(), freed) == ([], [])
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=True, freed=freed))
    assert (steps.release_caches(), freed) == (["torch"], ["torch"])
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=True, freed=freed, error=RuntimeError("dead")))
    assert (steps.release_caches(), freed) == ([], ["torch"])
