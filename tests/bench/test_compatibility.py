"""The compatibility matrix: its verdicts, what becomes of cases that fail, its page, and programs that run here.

llama.cpp's row needs `NVSHARE_LLAMA_DIR` with its libraries, the CUDA runtime and cuBLAS, and PyPI's gguf.

Non-goals: figures; what frameworks do, which needs a card.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench.compatibility import __main__ as matrix
from nvshare.bench.compatibility import page, remote
from nvshare.bench.compatibility.cases import Skipped
from nvshare.bench.compatibility.catalog import CASES, LARGE, SERVERS, SMALL, Case
from nvshare.bench.harness.fixture import BenchError, Fixture, fixture
from nvshare.bench.harness.worker_group import Member, closing
from nvshare.bench.workloads import llama
from tests.bench.test_benches_run import lines
from tests.conftest import ROOT, Built
from tests.waiting import BOUND_S, eventually

WORKS = Case("works", "sh.works", SMALL, limit_s=20.0)

PROGRAM = """#!/bin/sh
echo '{"ready": true}'
while read -r what seconds; do
  case "$what" in
    check) echo 'frameworks talk'; echo '{"digest": "d", "versions": {"sh": "1"}}' ;;
    time) echo '{"ns": 100000000}' ;;
  esac
done
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Options of a run whose cases `sh...` are the program above."""
    program = tmp_path / "program.sh"
    program.write_text(PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    known = matrix.command_of

    def command_of(case: Case, options: argparse.Namespace) -> list[str]:
        return [str(program), case.name] if case.name.startswith("sh.") else known(case, options)

    monkeypatch.setattr(matrix, "command_of", command_of)
    return argparse.Namespace(
        scratch=tmp_path, deadline=time.monotonic() + 200, gpus="1x1GiB", size_mib=32, capacity=None, processes=2,
        seconds=0.01,
    )  # fmt: skip


def test_verdicts() -> None:
    """Broken: a difference that is called equal, or noise within the tolerance that is called a difference."""
    base = {"digest": "a", "values": [1000.0, 2.0], "tolerance": 1e-3}
    assert matrix.verdict(base, {"digest": "a"}) == "identical"
    assert matrix.verdict(base, {"digest": "b", "values": [1000.5, 2.001]}) == "within tolerance"
    assert matrix.verdict(base, {"digest": "b", "values": [1002.0, 2.0]}) == "differs"
    assert matrix.verdict(base, {"digest": "b", "values": [1000.0]}) == "differs"
    assert matrix.verdict(base, {"digest": "b", "values": [float("nan"), 2.0]}) == "differs"
    assert matrix.verdict(base | {"tolerance": 0.0}, {"digest": "b", "values": base["values"]}) == "differs"
    assert matrix.verdict(base, {"error": "boom"}) == "failed: boom"


@pytest.mark.parametrize(("count", "outside"), [(1, 0), (5, 0), (8, 0), (9, 1), (12, 2), (15, 3), (30, 9)])
def test_interval_by_ranks(count: int, outside: int) -> None:
    """Broken: an interval too narrow claims more than was measured (the ranks are those of the sign test's tables)."""
    assert matrix.interval([float(number) for number in range(count)]) == (outside, count - 1 - outside)


def test_matrix_on_the_simulated_gpu(built: Built) -> None:
    """Broken: programs that are not really under the hook, or not there at the same time."""
    words = ("--simulate", "--case=driver.launches", "--mode=device", "--processes=1", "--seconds=0.1")
    told = lines("nvshare.bench.compatibility", *words)
    rows = page.final_rows(told)
    assert [(row["result"], row["alone"], row["two"]) for row in rows] == [("ok", "identical", ["identical"] * 2)]
    assert all(row["cost"]["hooked_steps_per_s"] > 0 for row in rows)
    assert sum(row["handovers"] for row in rows) > 0
    text = page.page(told)
    assert "simulated GPUs" in text
    assert all(f"| {row['case']} | device | ok |" in text for row in rows)


class Lossy(Member):
    """A rival that finds other values than it has written."""

    def answer(self, timeout_s: float) -> dict[str, Any]:
        told = super().answer(timeout_s)
        return told | {"mismatches": 2} if "mismatches" in told else told


@pytest.mark.usefixtures("built")
def test_beyond_capacity_there_is_a_rival(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: rows beyond capacity would be measured on an idle card, or a rival's lost data would stay unnoticed."""
    with matrix.place("1x1GiB", WORKS, "beyond", 32 << 20, None) as stand:
        eventually(lambda: stand.control("status")["gpus"][0]["allocated_bytes"] > 36 << 20, "the rival's memory")
        assert stand.control("status")["gpus"][0]["capacity_bytes"] == 64 << 20
    monkeypatch.setattr(matrix, "Member", Lossy)
    row = matrix.run_case(WORKS, "beyond", options)
    assert (row["result"], row["reason"]) == (
        "failed", "the rival found 2 pages with other values than it had written",
    )  # fmt: skip


def trains(stand: Fixture) -> bool:
    return [client["name"] for client in stand.control("clients")["clients"]] == ["training"]


def end_training(server: Case) -> None:
    with matrix.place("1x1GiB", server, "beside", 32 << 20, None) as stand:
        os.kill(stand.control("clients")["clients"][0]["process_id"], signal.SIGKILL)
        eventually(lambda: not trains(stand), "its end")


@pytest.mark.usefixtures("built")
def test_beside_a_training() -> None:
    """Broken: a server's row would be measured without its neighbour, or its neighbour's end would stay unnoticed."""
    server = Case("server", "sh.server", SERVERS)
    with matrix.place("1x1GiB", server, "beside", 32 << 20, None) as stand:
        assert trains(stand)
    with pytest.raises(BenchError, match="has ended"):
        end_training(server)


def test_a_remote_program_itself_is_not_hooked(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a row of a remote program would show the program under the hook, and not the server's calls for it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NVSHARE_LUPINE_DIR", str(tmp_path))
    assert remote.missing() == "no lupine_driver_server on PATH"
    server, told = tmp_path / remote.SERVER, tmp_path / "environment"
    server.write_text(f"#!/bin/sh\nenv >{told}\nexec sleep 60\n", encoding="utf-8")
    server.chmod(0o755)
    assert "libcuda.so.1: NVSHARE_LUPINE_DIR names" in remote.missing()
    (tmp_path / "libcuda.so.1").symlink_to(built.sim_dir / "libcuda.so.1")
    assert not remote.missing()
    command = [sys.executable, "-m", "nvshare.bench.compatibility.remote", "driver.launches"]
    with fixture(simulate="1x1GiB") as stand:
        member = Member(stand, command, hooked=True, name="remote")
        with closing([member]):
            member.answer(BOUND_S)
            assert "digest" in member.ask("check", BOUND_S)
            eventually(told.exists, "the server's start")
            assert not stand.control("clients")["clients"], "the program is under the hook; the server makes no calls"
    assert "libnvshare_hook.so" in told.read_text(encoding="utf-8")


def test_every_row_has_its_own_name() -> None:
    """Broken: two rows of one name overwrite each other on the page."""
    names = [(case.row, mode) for case in CASES for mode in case.modes]
    assert len(names) == len(set(names))


def test_the_page_is_made_by_the_script() -> None:
    """Broken: a page that was edited by hand says what nobody has measured."""
    text = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    assert text.startswith(page.HEAD)
    assert text == page.page([]) or "\nMachine: NVIDIA" in text
    assert "simulated" not in text


def test_llama_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: a row that fails where it should be skipped, without what to install."""
    from nvshare.bench.compatibility.cases import programs_cases
    from nvshare.bench.workloads import day_job

    monkeypatch.delenv(llama.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(day_job, "model_file", lambda directory, size: tmp_path / "model")
    with pytest.raises(Skipped, match=llama.DIRECTORY_VARIABLE):
        programs_cases.llama().check()
    monkeypatch.setenv(llama.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(llama, "CUDA_LIBRARIES", ())
    with pytest.raises(llama.LlamaMissingError, match="has no libllama"):
        llama.Llama(tmp_path / "model")


@pytest.mark.skipif(not os.environ.get(llama.DIRECTORY_VARIABLE), reason=f"{llama.DIRECTORY_VARIABLE} is not set")
@pytest.mark.usefixtures("built")
def test_llama_under_pressure(options: argparse.Namespace) -> None:
    """Broken: llama.cpp's CUDA backend, unchanged, loses memory or order under the hook."""
    (case,) = (case for case in CASES if case.name == "programs.llama")
    assert case.modes == LARGE
    options.capacity = "160MiB"
    for mode in ("device", "managed", "swap", "beyond"):
        row = matrix.run_case(case, mode, options)
        assert (row["result"], row["two"]) == ("ok", ["identical", "identical"]), row
    assert row["moved_gib"] > 0
