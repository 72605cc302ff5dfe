"""A Jupyter notebook that uses CuPy and PyTorch in turns, executed by nbclient in a kernel of its own.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import nbclient
import nbformat

from nvshare.bench.compatibility.cases.program import Outcome, Program, size_bytes

CELLS = (
    "import cupy, torch, numpy, time, json, hashlib\nseen = hashlib.sha256()\nsums = []\nsize = SIZE // 8",
    "rows = max(1, size // (4 << 20))\n"
    "table = cupy.random.RandomState(89).random_sample((rows, 1 << 20), dtype=cupy.float32)\n"
    "time.sleep(0.5)",
    "torch.manual_seed(97)\nweights = torch.randn(rows, 1 << 10, 1 << 10, device='cuda')\ntime.sleep(0.5)",
    "for turn in range(4):\n"
    "    table = cupy.sqrt(table * 0.5 + 0.25)\n"
    "    seen.update(cupy.asnumpy(table[:, :: 1 << 10]).tobytes())\n"
    "    sums.append(float(table.mean()))\n"
    "    time.sleep(0.3)",
    "for turn in range(4):\n"
    "    weights = torch.tanh(weights) * 1.5\n"
    "    seen.update(weights[:, ::64].cpu().numpy().tobytes())\n"
    "    sums.append(float(weights.double().abs().mean()))\n"
    "    time.sleep(0.3)",
    "shared = torch.as_tensor(table[: rows // 2], device='cuda')\n"
    "sums.append(float(shared.double().sum()))\n"
    "print(json.dumps({'digest': seen.hexdigest(), 'sums': sums}))",
)


def versions() -> dict[str, str]:
    """Versions for the record."""
    return {"nbclient": nbclient.__version__}


def cupy_torch() -> Program:
    """All cells, from a fresh kernel."""

    def check() -> Outcome:
        new: Any = nbformat.v4
        notebook = new.new_notebook(
            cells=[new.new_code_cell(cell.replace("SIZE", str(size_bytes()))) for cell in CELLS]
        )
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python", "language": "python"}
        client: Any = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
        client.create_kernel_manager().kernel_spec.argv[:1] = [sys.executable]
        client.execute()
        told = json.loads(notebook.cells[-1].outputs[0]["text"])
        outcome = Outcome()
        outcome.bytes_of(_bytes(told["digest"]))
        for value in told["sums"]:
            outcome.figure(value)
        return outcome

    return Program(check, None, lambda: None)


def _bytes(digest: str) -> Any:
    import numpy

    return numpy.frombuffer(bytes.fromhex(digest), dtype=numpy.uint8)


CASES = {"cupy_torch": cupy_torch}
