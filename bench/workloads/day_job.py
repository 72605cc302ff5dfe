"""A program of `nvshare.bench.day`: it does one unit of work for each line that it reads.

    python -m nvshare.bench.workloads.day_job server|images|notebook|training|ballast cuda|driver MIB

It prints `{"ready": true, ...}` once its memory is filled.  `unit SEED` answers `{"first", "end"}` (monotonic clock,
seconds; `first` when the first token was there), `count` (tokens, images, passes) and `digest` of what is repeatable.
`steps UNTIL` trains up to that time and answers the number of steps and `end`.  It ends with its input.

On `driver` (simulated GPUs) each is a double that writes all of its memory and compares it.  `ballast` takes all of the
card but so many MiB.

Non-goals: when work comes, and what becomes of the figures.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from nvshare.bench.workloads.busy import CudaError, Driver
from nvshare.bench.workloads.llama import Llama, LlamaMissingError, model_file
from nvshare.bench.workloads.resident import MIB, Job

PROMPT_TOKENS, TOKENS = 128, 64


class Work(Protocol):
    """A unit of work in parts; the first one is there when a user sees something.  `about` describes the program."""

    about: dict[str, Any]

    def unit(self, seed: int) -> Iterator[Any]:
        """The parts, as they are finished."""


class Double:
    """Without a framework: each part writes all of the memory."""

    about: dict[str, Any] = {"program": "double"}  # noqa: RUF012 (a constant)

    def __init__(self, name: str, size_mib: int) -> None:
        self._parts, step_ms = {"server": (8, 2.0), "images": (1, 20.0), "notebook": (1, 5.0)}.get(name, (1, 5.0))
        self._job = Job(size_mib * MIB, step_ms)

    def unit(self, seed: int) -> Iterator[int]:
        """Steps of the job."""
        for part in range(self._parts):
            self._job.step()
            if self._job.mismatches:
                raise RuntimeError(f"{self._job.mismatches} pages have other values than were written")
            yield part


class LlamaServer:
    """llama.cpp, one request at a time."""

    def __init__(self, size_mib: int) -> None:
        directory = Path(os.environ.get("NVSHARE_BENCH_MODELS", tempfile.gettempdir()))
        self._llama = Llama(model_file(directory, size_mib * MIB))
        self.about = {"program": "llama.cpp"}

    def unit(self, seed: int) -> Iterator[int]:
        """Greedy tokens after a random prompt."""
        chance = random.Random(seed)
        yield from self._llama.generate(chance.choices(range(self._llama.vocabulary), k=PROMPT_TOKENS), TOKENS)


class TransformersServer:
    """A Llama of transformers, one request at a time."""

    def __init__(self, size_mib: int, why: str) -> None:
        from nvshare.bench.compatibility.programs.server_cases import decoder

        self._model = decoder(size_mib * MIB)
        self.about = {"program": "transformers", "why": why}

    def unit(self, seed: int) -> Iterator[int]:
        """Greedy tokens after a random prompt."""
        import torch

        chance = random.Random(seed)
        tokens, cache = torch.tensor([chance.choices(range(4096), k=PROMPT_TOKENS)], device="cuda"), None
        with torch.inference_mode():
            for _ in range(TOKENS):
                out = self._model(tokens, past_key_values=cache, use_cache=True)
                cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
                yield int(tokens.item())


class DiffusersImages:
    """The UNet of SDXL twice, as base and refiner."""

    about: dict[str, Any] = {"program": "diffusers"}  # noqa: RUF012 (a constant)

    def __init__(self) -> None:
        from nvshare.bench.compatibility.programs import diffusers_cases

        self._image = diffusers_cases.unet_image
        self._pipelines = [diffusers_cases.unet_pipeline("cuda") for _ in range(2)]

    def unit(self, seed: int) -> Iterator[float]:
        """An image."""
        last: Any = None
        for pipeline, embedding in self._pipelines:
            last = self._image(pipeline, embedding, seed, steps=10)
        yield float(last.float().sum())


class TorchImages:
    """Passes over 4096 patches through a transformer, where there is no diffusers."""

    about: dict[str, Any] = {"program": "torch transformer"}  # noqa: RUF012 (a constant)

    def __init__(self, size_mib: int) -> None:
        import torch

        from nvshare.bench.workloads.models import Block

        count = max(1, size_mib * MIB // (2 * 12 * 2048 * 2048))
        with torch.device("cuda"):
            self._model = torch.nn.Sequential(*(Block(2048, 16).to(torch.bfloat16) for _ in range(count))).eval()

    def unit(self, seed: int) -> Iterator[float]:
        """An image."""
        import torch

        values = torch.randn(1, 4096, 2048, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
        with torch.inference_mode():
            for _ in range(10):
                values = self._model(values)
        yield float(values.float().sum())


class Notebook:
    """Tables that a cell goes over when somebody comes back to it."""

    about: dict[str, Any] = {"program": "torch"}  # noqa: RUF012 (a constant)

    def __init__(self, size_mib: int) -> None:
        import torch

        self._tables = [torch.ones(64 << 20, device="cuda") for _ in range(max(1, size_mib // 256))]

    def unit(self, seed: int) -> Iterator[float]:
        """A cell."""
        for _ in range(20):
            for table in self._tables:
                table.mul_(-1)
        yield float(sum(table[::4096].abs().sum() for table in self._tables))


class Training:
    """AdamW on a transformer; a unit is a step."""

    about: dict[str, Any] = {"program": "torch"}  # noqa: RUF012 (a constant)

    def __init__(self, size_mib: int) -> None:
        import torch

        from nvshare.bench.compatibility.programs.training_cases import training_model

        with torch.device("cuda"):
            self._model = training_model(size_mib * MIB)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def unit(self, seed: int) -> Iterator[float]:
        """A step."""
        import torch
        from torch.nn import functional

        self._optimizer.zero_grad(set_to_none=True)
        tokens = torch.randint(50_000, (4, 256), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self._model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        yield float(loss.detach())


class Ballast:
    """All of the card but so much."""

    about: dict[str, Any] = {"program": "ballast"}  # noqa: RUF012 (a constant)

    def __init__(self, left_mib: int) -> None:
        cuda = Driver()
        cuda.use()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if (size := free.value - left_mib * MIB) > 0:
            cuda.memory(size)

    def unit(self, seed: int) -> Iterator[int]:
        """Nothing."""
        yield 0


def work(name: str, where: str, size_mib: int) -> Work:
    """The program of this name."""
    if name == "ballast":
        return Ballast(size_mib)
    if where == "driver":
        return Double(name, size_mib)
    if name == "server":
        try:
            return LlamaServer(size_mib)
        except LlamaMissingError as why:
            return TransformersServer(size_mib, str(why))
    if name == "images":
        return DiffusersImages() if importlib.util.find_spec("diffusers") else TorchImages(size_mib)
    return Notebook(size_mib) if name == "notebook" else Training(size_mib)


def unit(program: Work, seed: int) -> dict[str, Any]:
    """One unit, timed."""
    first, parts = None, []
    for part in program.unit(seed):
        first = first or time.monotonic()
        parts.append(part)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return {"first": first, "end": time.monotonic(), "count": len(parts), "digest": digest}


def steps(program: Work, until: float) -> dict[str, Any]:
    """Units up to a time, at least one."""
    count = 0
    while count == 0 or time.monotonic() < until:
        unit(program, count)
        count += 1
    return {"count": count, "end": time.monotonic()}


def main() -> int:
    """Command line."""
    if len(sys.argv) != 4 or sys.argv[2] not in {"cuda", "driver"}:
        sys.stderr.write("usage: python -m nvshare.bench.workloads.day_job NAME cuda|driver MIB\n")
        return 2
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what frameworks print
    try:
        program = work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        if sys.argv[1] != "ballast":
            unit(program, 0)  # compiles, fills caches and the optimiser
        answers.write(json.dumps({"ready": True, **program.about}) + "\n")
        answers.flush()
        for line in sys.stdin:
            word, value = line.split()
            told = unit(program, int(value)) if word == "unit" else steps(program, float(value))
            answers.write(json.dumps(told) + "\n")
            answers.flush()
    except (RuntimeError, CudaError) as error:
        sys.stderr.write(f"{sys.argv[1]}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
