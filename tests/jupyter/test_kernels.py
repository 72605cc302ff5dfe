"""Two notebooks share one simulated GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.cli import ctl
from tests.conftest import ROOT
from tests.end_to_end.conftest import Node
from tests.jupyter.conftest import USE, Notebook, started_kernel
from tests.waiting import BOUND_S, eventually

pytest.importorskip("ipykernel", reason="Jupyter is not installed: pip install '.[test]'")

WAIT = "work()\nprint('done')"


def test_two_notebooks_share_a_gpu(node: Node, notebook: Callable[[], Notebook]) -> None:
    """Both use the GPU, `%gpu` shows it, and a change of class reaches the coordinator."""
    node.start_coordinator()
    first, second = notebook(), notebook()
    for each in (first, second):
        assert each.run(USE) == "", each.error
        each.run("%load_ext nvshare")
        shown = each.run("%gpu")
        assert "memory 64MiB of 1GiB" in shown
        assert "class interactive" in shown
    assert first.run("%gpu class batch") == "this notebook is batch from now on\n"
    assert "class batch" in first.run("%gpu")
    assert "a program that waits gets the GPU now" in first.run("%gpu release")
    assert first.run("%gpu park") == "this notebook is off the GPU\n", first.error
    assert first.run("work()") == "", first.error
    assert "%gpu class NAME" in first.run("%gpu what")
    classes = sorted(client["job_class"] for client in node.control("status")["clients"])
    assert classes == ["batch", "interactive"]


def test_a_waiting_cell_says_so_and_can_be_interrupted(node: Node, notebook: Callable[[], Notebook]) -> None:
    """The line appears below the cell; Jupyter's interrupt ends the wait, and the next cell works."""
    node.start_coordinator()
    book = notebook()
    book.run(USE)
    (client,) = node.control("status")["clients"]
    node.control("pause", f"c{client['client']}")
    eventually(lambda: node.control("status")["gpus"][0]["holders"] == [], "the lease to be given back")
    request = book.begin(WAIT)
    shown = book.listen(lambda message: "waiting for GPU 0" in str(message["content"].get("text", "")))
    assert "this program is paused" in shown
    book.manager.interrupt_kernel()
    assert "done" not in book.end(request)
    assert book.error == "KeyboardInterrupt"
    node.control("resume", f"c{client['client']}")
    assert book.run(WAIT).endswith("done\n")


CACHE = """
import cupy, nvshare
%load_ext nvshare
nvshare.on_pressure(lambda: print("short of memory"))
x = cupy.zeros(150 << 20, dtype=cupy.uint8)
del x
"""


def test_a_notebook_frees_its_caches_between_cells(node: Node, specs: Path, tmp_path: Path) -> None:
    """Broken: memory that a notebook's libraries keep unused moves, or is freed though the user wants to keep it."""
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install '.[cupy]'")
    node.start_coordinator("--capacity=256MiB")
    environment = node.environment() | {"NVSHARE_SIMULATE": node.simulate, "NVSHARE_MEMORY": "swap"}
    environment |= {"CUPY_CACHE_DIR": str(tmp_path)}
    environment.pop("PYTEST_CURRENT_TEST", None)

    def released() -> list[int]:
        return [seat["released_bytes"] for client in node.control("status")["clients"] for seat in client["seats"]]

    with started_kernel(specs, environment) as first, started_kernel(specs, environment) as second:
        assert first.run(CACHE) == "", "nobody else needs the GPU"
        assert "stays when the GPU is short" in first.run("%gpu autorelease off")
        second.run("import cupy; y = cupy.zeros(150 << 20, dtype=cupy.uint8)")
        assert second.error == ""
        assert first.run("1") == "short of memory\n"
        assert released() == [0, 0]
        assert "is freed after a cell" in first.run("%gpu autorelease on")
        eventually(lambda: released()[0] >= 150 << 20, "the report")


def test_the_magic_outside_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook without the hook is told how to get it, in one sentence."""
    from nvshare.coordinator.cli.jupyter import magic

    magic.gpu("")
    assert "does not run under the nvshare hook" in capsys.readouterr().out


def test_the_kernel_has_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvshare-ctl kernelspec install`: class, mode, limit and names reach the kernel."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    words = ["kernelspec", "install", "--user", "--class=batch", "--memory=swap", "--limit=8GiB"]
    with pytest.raises(SystemExit) as ended:
        ctl.main([*words, "--name=big", "--display-name=Big"])
    assert ended.value.code == 0
    spec = json.loads((tmp_path / "kernels" / "big" / "kernel.json").read_text())
    assert spec["display_name"] == "Big"
    assert spec["argv"][0] == sys.executable
    assert spec["env"] == {
        "NVSHARE_ENABLE": "1",
        "NVSHARE_CLASS": "batch",
        "NVSHARE_MEMORY": "swap",
        "NVSHARE_MEMORY_LIMIT": "8GiB",
    }
    with pytest.raises(SystemExit) as refused:
        ctl.main(["kernelspec", "install", "--name=../x"])
    assert refused.value.code == 2


def test_the_example_runs(node: Node, specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a reader of docs/tutorials runs the notebook and gets an error."""
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install '.[cupy]'")
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    node.start_coordinator()
    for name, value in (
        node.environment() | {"NVSHARE_SIMULATE": node.simulate, "CUPY_CACHE_DIR": str(tmp_path)}
    ).items():
        monkeypatch.setenv(name, value)
    manager = AsyncKernelManager(kernel_name="nvshare", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(specs)]))
    reader: Any = nbformat
    example = reader.read(ROOT / "docs" / "tutorials" / "two-notebooks.ipynb", as_version=4)
    NotebookClient(example, km=manager, timeout=int(BOUND_S)).execute()
    shown = [cell.outputs[0]["text"] for cell in example.cells if cell.source == "%gpu"]
    assert "memory 64MiB of 1GiB" in shown[0]
