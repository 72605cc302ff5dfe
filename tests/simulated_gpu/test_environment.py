"""`GPUS[xCAPACITY]`, and the environment that makes programs load the simulated libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvshare.simulated_gpu import LIBRARIES, LibraryNotFoundError, library_directory
from nvshare.simulated_gpu.environment import SimulatedCards, parse_cards, simulated_environment
from nvshare.simulated_gpu.trace import StateFileError, read_trace
from tests.conftest import Built

GIB = 1 << 30


@pytest.mark.parametrize(
    ("spec", "cards"),
    [
        ("1", SimulatedCards(1, 16 * GIB)),
        ("2x8GiB", SimulatedCards(2, 8 * GIB)),
        ("4x512MiB", SimulatedCards(4, GIB // 2)),
        ("1x1.5g", SimulatedCards(1, GIB * 3 // 2)),
        ("1x10000000000", SimulatedCards(1, 10**10)),
    ],
)
def test_descriptions_of_cards(spec: str, cards: SimulatedCards) -> None:
    """A wrong capacity would change every oversubscription test."""
    assert parse_cards(spec) == cards
    assert parse_cards(str(cards)) == cards


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("", "GPUS"),
        ("0", "1 to 32"),
        ("33x1GiB", "1 to 32"),
        ("x8GiB", "GPUS"),
        ("2x8parsecs", "unit"),
        ("1x3KiB", "less"),
    ],
)
def test_wrong_descriptions_of_cards(spec: str, word: str) -> None:
    """Users type these by hand."""
    with pytest.raises(ValueError, match=word):
        parse_cards(spec)


def test_environment_puts_the_simulated_libraries_first(built: Built, tmp_path: Path) -> None:
    """Behind the directory of a real driver they would not be found."""
    base = {"LD_LIBRARY_PATH": f"/usr/lib/x:{library_directory()}", "HOME": "/root"}
    environment = simulated_environment(tmp_path / "state", "2x8GiB", base)
    assert environment["LD_LIBRARY_PATH"] == f"{library_directory()}:/usr/lib/x"
    assert environment["NVSHARE_SIM_STATE"] == str(tmp_path / "state")
    assert environment["HOME"] == "/root"
    assert parse_cards(environment["NVSHARE_SIMULATE"]) == SimulatedCards(2, 8 * GIB)
    assert "NVSHARE_SIMULATE" not in simulated_environment(tmp_path / "state", None, {})


def test_named_libraries_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests of a build must not use the installed libraries."""
    installed, own = tmp_path / "installed" / "lib", tmp_path / "own"
    for directory in (installed, own):
        directory.mkdir(parents=True)
        for name in LIBRARIES:
            (directory / name).touch()
    monkeypatch.setattr("nvshare.simulated_gpu.__file__", str(installed.parent / "__init__.py"))
    monkeypatch.setenv("NVSHARE_SIM_LIBRARY_DIR", str(own))
    assert library_directory() == own
    (own / LIBRARIES[0]).unlink()
    with pytest.raises(LibraryNotFoundError, match="own"):
        library_directory()
    monkeypatch.delenv("NVSHARE_SIM_LIBRARY_DIR")
    assert library_directory() == installed


def test_missing_libraries_name_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message helps the user of a broken installation."""
    monkeypatch.setattr("nvshare.simulated_gpu.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.metadata.distribution", _no_distribution)
    monkeypatch.setenv("NVSHARE_SIM_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(LibraryNotFoundError, match="pip install"):
        library_directory()


def _no_distribution(name: str) -> None:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)


def test_a_foreign_file_is_an_error(tmp_path: Path) -> None:
    """A trace from a foreign file would prove nothing."""
    with pytest.raises(StateFileError, match="cannot read"):
        read_trace(tmp_path / "nothing")
    (tmp_path / "other").write_bytes(b"x" * 4096)
    with pytest.raises(StateFileError, match="version"):
        read_trace(tmp_path / "other")
