"""The programs of gigabytes on the compatibility page: models for llama.cpp, and its CUDA backend on a simulated GPU.

llama.cpp's rows need `NVSHARE_LLAMA_DIR` with its libraries, the CUDA runtime and cuBLAS, and PyPI's gguf.

Non-goals: what the frameworks compute, which needs a card.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from nvshare.bench.compatibility import run as compatibility
from nvshare.bench.compatibility.cases import catalog, host, program
from nvshare.bench.compatibility.cases.catalog import LARGE, PROGRAMS, Case, Group
from nvshare.bench.compatibility.rows import Run
from nvshare.bench.harness.fixture import fixture
from nvshare.bench.harness.worker_group import Member, closing
from nvshare.bench.workloads.llama import DIRECTORY_VARIABLE, LlamaMissingError, shape_of, write_model
from tests.waiting import eventually

needs_llama = pytest.mark.skipif(not os.environ.get(DIRECTORY_VARIABLE), reason=f"{DIRECTORY_VARIABLE} is not set")
LLAMA = next(group for group in PROGRAMS if group.name == "llama")

PROGRAM = """#!/bin/sh
echo '{"ready": true, "versions": {}}'
while read -r what name steps; do
  echo '{"digest": "d", "timed": false}'
done
"""


def settings(tmp_path: Path, **programs: Path | str) -> Run:
    """A run on one simulated card of 1 GiB; programs have 32 MiB."""
    return Run("1x1GiB", 0.01, None, 1, time.monotonic() + 250, tmp_path, programs, size_bytes=32 << 20)


def test_models_are_the_size_that_is_asked_for() -> None:
    """Broken: a program that is said to want 10 GiB would fit beside the others."""
    for size_mib in (64, 6144, 10240):
        shape = shape_of(size_mib << 20)
        weights = shape.layers * sum(rows * columns for rows, columns in shape.matrices().values())
        weights += 2 * shape.vocabulary * shape.width
        assert weights * 34 / 32 == pytest.approx(size_mib << 20, rel=0.05)


def test_a_model_is_the_same_each_time(tmp_path: Path) -> None:
    """Broken: tokens with and without the hook would be of different models."""
    gguf = pytest.importorskip("gguf")
    for name in "ab":
        write_model(tmp_path / f"{name}.gguf", 16 << 20)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert len(reader.tensors) == 9 * shape_of(16 << 20).layers + 3
    first, last = (reader.tensors[number].data for number in (0, 1))
    assert not numpy.array_equal(first, last), "tensors differ from each other"


def test_llama_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: a row that fails where it should be skipped, without what to install."""
    from nvshare.bench.compatibility.programs import llama_cases
    from nvshare.bench.workloads import llama

    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(llama_cases, "model_file", lambda directory, size: tmp_path / "model")
    with pytest.raises(program.Skipped, match=DIRECTORY_VARIABLE):
        llama_cases.greedy()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(llama, "CUDA_LIBRARIES", ())
    with pytest.raises(LlamaMissingError, match="has no libllama"):
        llama.Llama(tmp_path / "model")


def test_every_program_has_its_case() -> None:
    """Broken: a row of the page whose program cannot be found."""
    folder = Path(catalog.__file__).parents[1] / "programs"
    for group in PROGRAMS:
        (case,) = group.cases
        module, _, name = case.name.partition(".")
        assert f'"{name}": {name}' in (folder / f"{module}_cases.py").read_text(encoding="utf-8")
        assert case.modes == LARGE


def test_hosts_find_cases_of_both_folders() -> None:
    """Broken: programs of gigabytes would not start."""
    assert set(host.cases_of("llama").CASES) == {"greedy"}
    with pytest.raises(ModuleNotFoundError, match="nothing_cases"):
        host.cases_of("nothing")


class Lossy(Member):
    """A rival that finds other values than it has written."""

    def answer(self, timeout_s: float) -> dict[str, Any]:
        told = super().answer(timeout_s)
        return told | {"mismatches": 2} if "mismatches" in told else told


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("lossy", [False, True])
def test_beyond_capacity_there_is_a_rival(
    lossy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: rows beyond capacity would be measured on an idle card, or a rival's lost data would stay unnoticed."""
    target = tmp_path / "program.sh"
    target.write_text(PROGRAM, encoding="utf-8")
    target.chmod(0o755)
    if lossy:
        monkeypatch.setattr(compatibility, "Member", Lossy)
    case = Case("talks", "talks", LARGE)
    now, group = settings(tmp_path, shell=target), Group("shell", (case,), build="shell")
    (row,) = compatibility.run_group(now, group, "beyond", [case])
    if lossy:
        assert (row.result, row.reason) == ("failed", "the rival found 2 pages with other values than it had written")
        return
    assert (row.result, row.cost, row.verdicts.two) == ("ok", None, ["identical", "identical"])
    with compatibility.place(now, "beyond") as stand:
        eventually(lambda: stand.control("status")["gpus"][0]["allocated_bytes"] > 36 << 20, "the rival's memory")
        assert stand.control("status")["gpus"][0]["capacity_bytes"] == 64 << 20


@needs_llama
def test_llama_in_all_modes_and_three_at_a_time(built: object, tmp_path: Path) -> None:
    """Broken: llama.cpp's CUDA backend, unchanged, loses memory or order under the hook."""
    now = settings(tmp_path)
    command = compatibility.command_of(now, LLAMA)
    with fixture(simulate="1x1GiB", quantum="20ms", more=("--capacity", "160MiB")) as stand:

        def member(mode: str | None, number: int = 0) -> Member:
            options = ("--memory", mode) if mode else ()
            extra = now.environment(LLAMA)
            return Member(stand, command, hooked=bool(mode), name=f"{mode}-{number}", options=options, extra=extra)

        def digests(members: list[Member]) -> set[Any]:
            with closing(members):
                for one in members:
                    one.answer(120.0)
                    one.tell("check llama.greedy")
                return {one.answer(120.0).get("digest") for one in members}

        before = digests([member(None)])
        assert before != {None}
        for mode in ("device", "managed", "swap"):
            assert digests([member(mode)]) == before, mode
        assert digests([member("swap", number) for number in range(3)]) == before
        assert stand.control("status")["gpus"][0]["evicted_bytes"] > 0
