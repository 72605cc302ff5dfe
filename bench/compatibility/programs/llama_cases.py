"""llama.cpp's CUDA backend: greedy tokens of a model with random weights.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy

from nvshare.bench.compatibility.cases.program import Outcome, Program, Skipped, size_bytes
from nvshare.bench.workloads.llama import DIRECTORY_VARIABLE, Llama, LlamaMissingError, model_file


def versions() -> dict[str, str]:
    """Versions for the record: those in the names of the libraries."""
    names = [path.name for path in Path(os.environ.get(DIRECTORY_VARIABLE, ".")).glob("libllama.*.so")]
    return {"llama.cpp": names[0].removeprefix("libllama.").removesuffix(".so")} if names else {}


def greedy() -> Program:
    """Prompts of several lengths, and the likeliest tokens after each."""
    directory = Path(os.environ.get("NVSHARE_BENCH_MODELS", tempfile.gettempdir()))
    try:
        llama = Llama(model_file(directory, size_bytes()))
    except LlamaMissingError as why:
        raise Skipped(str(why)) from None
    source = numpy.random.default_rng(41)
    prompts = [source.integers(0, llama.vocabulary, length).tolist() for length in (8, 200, 33, 700)]

    def check() -> Outcome:
        outcome = Outcome()
        for prompt in prompts:
            outcome.bytes_of(numpy.array(list(llama.generate(prompt, 48)), dtype=numpy.int32))
        return outcome

    check()  # a simulated GPU computes nothing: there, tokens follow from what the memory held before
    return Program(check, lambda: list(llama.generate(prompts[0], 1)), lambda: None)


CASES = {"greedy": greedy}
