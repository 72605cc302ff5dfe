"""The bypass detector and NVML figures on a real card: CUPTI, driver and nvidia-smi as they are, not our doubles.

Every run has its own embedded coordinator, and device memory only.

Non-goals: what the simulated GPU shows as well.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.gpu.conftest import Run
from tests.gpu.detector import reports
from tests.gpu.detector.reports import Report, find_cupti
from tests.hook.compiled import compile_c
from tests.hook.memory.test_memory_process import PROGRAMS

pytestmark = pytest.mark.gpu

GIB = 1 << 30


needs_cupti = pytest.mark.skipif(find_cupti() is None, reason="no CUPTI here: pip install nvidia-cuda-cupti")

Watched = Callable[..., tuple[list[Report], str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> str:
    """program.c, linked by the name that both drivers have."""
    out = tmp_path_factory.mktemp("detector") / "program"
    return str(compile_c(out, reports.HERE / "program.c", built.sim_dir / "libcuda.so.1"))


@pytest.fixture
def watched(hooked: Run, tmp_path: Path) -> Watched:
    """Reports and output of a command under the detector."""

    def run(*command: str) -> tuple[list[Report], str]:
        cupti, directory = find_cupti(), tmp_path / "reports"
        assert cupti is not None
        directory.mkdir()
        variables = reports.environment(reports.build(tmp_path), cupti, directory)
        done = hooked("--memory=device", "--", *command, **variables)
        return reports.read(directory), done.stdout + done.stderr

    return run


@needs_cupti
def test_everything_that_goes_through_the_hook_passes(watched: Watched, program: str) -> None:
    """Broken: a kernel runs that no call in a lease has submitted."""
    [report], said = watched(program, "gated")
    assert (report.problem, report.escapes) == (None, ()), said
    assert (report.kernels, report.kernels_gated) == (106, 106)


@needs_cupti
def test_what_goes_around_the_hook_is_seen(watched: Watched, program: str) -> None:
    """The negative control: without it, the other tests prove nothing."""
    [report], _ = watched(program, "raw")
    assert {function for function, _, _ in report.escapes} == {"cuLaunchKernel", "cuMemcpyHtoD_v2", "cuGraphLaunch"}
    assert report.kernels - report.kernels_gated == 6
    assert {kernel for name, kernel, ran in report.escapes if ran and name != "cuMemcpyHtoD_v2"} == {"nvs_busy"}


@needs_cupti
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here")
def test_pytorch_passes_whole(watched: Watched) -> None:
    """Matrix products, convolutions, random numbers, copies, a graph: each comes by another library and look-up."""
    script = (
        "import torch\n"
        "x = torch.randn(64, 64, device='cuda', dtype=torch.bfloat16)\n"
        "y = (x @ x).relu().sum()\n"
        "i, w = torch.randn(2, 3, 16, 16, device='cuda'), torch.randn(4, 3, 3, 3, device='cuda')\n"
        "c = torch.nn.functional.conv2d(i, w)\n"
        "f = torch.fft.fft(torch.randn(256, device='cuda'))\n"
        "s = torch.zeros(8, device='cuda'); g = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(g):\n"
        "    s += 1\n"
        "g.replay(); g.replay()\n"
        "print(float(y), c.cpu().sum().item(), f.abs().sum().item(), s.tolist())\n"
    )
    found, said = watched(sys.executable, "-c", script)
    assert [(report.problem, report.escapes) for report in found] == [(None, ())] * len(found), said
    assert sum(report.kernels for report in found) > 10
    assert all(report.kernels == report.kernels_gated for report in found)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi here")
def test_nvidia_smi_shows_the_virtual_card(hooked: Run) -> None:
    """Its own way to NVML must lead through the hook, whatever it is."""
    query = ("nvidia-smi", "--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits")
    limited = hooked("--memory=device", "--gpu-memory-limit=4GiB", "--", *query)
    assert {line.replace(" ", "") for line in limited.stdout.splitlines()} == {"4096,0,4096"}


def test_figures_agree_on_the_card(hooked: Run) -> None:
    """NVML counts what the driver keeps, CUDA does not: under a quota both must say the same."""
    asked = "start\nalloc 67108864\ninfo\nnvml 0\npid\nprocesses 0 3\n"
    limit = ("--memory=device", f"--gpu-memory-limit={4 * GIB}")
    done = hooked(*limit, "--", sys.executable, str(PROGRAMS / "nvml_program.py"), data=asked)
    _, started, allocated, figures, nvml, process, listed = done.stdout.splitlines()
    assert (started, json.loads(allocated)[0]) == ("0", 0)
    _, free, total, of_device = json.loads(figures)
    assert (total, of_device, free) == (4 * GIB, 4 * GIB, 4 * GIB - 67108864)
    assert json.loads(nvml)[:3] == [total, free, 67108864]
    own = [used for process_id, used in json.loads(listed) if process_id == int(process)]
    assert own in ([], [67108864])  # in a container the driver may know the process by another number
