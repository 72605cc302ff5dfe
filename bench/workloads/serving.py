"""A model server for `nvshare.bench.servers`, with so many requests under way at a time as it is told.

    python -m nvshare.bench.workloads.serving torch|vllm|double cuda|cpu MIB IN_FLIGHT...

After its warm-up it prints `{"ready": true, ...}`.  For each line `window IN_FLIGHT BEGIN END` (monotonic clock,
seconds) it works at once, takes no request after END, ends those that are under way and answers `rate` (tokens a second
between BEGIN and END), `first_ms` (from a request to its first token, of the requests of that time) and `answers`
(prompt, digest of its tokens, how often).  It ends with its input.

A request is a prompt of 128 tokens, one of 64 prompts, and has 64 tokens, the likeliest ones.  The next one comes when
one has ended.  The first ones of a window are shorter, so that they do not all end at the same time.

Non-goals: text, a network, what becomes of the figures.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import importlib.metadata
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from nvshare.bench.workloads.busy import CudaError
from nvshare.bench.workloads.resident import MIB, Job

PROMPT_TOKENS, TOKENS, PROMPTS = 128, 64, 64
LARGE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip
"""Llama 3.2 1B, with an output layer that is not its table: 2.8 GiB of weights."""
SMALL = LARGE | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
VLLM_REST = 1536 * MIB
"""Of a vLLM server's size: activations and CUDA graphs."""


class Slots(Protocol):
    """A batch of one size."""

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        """Reads a prompt; its first token."""

    def step(self) -> list[int]:
        """The next token of each slot."""


class Double:
    """Without a framework: each step writes all of the memory, and compares it now and then."""

    def __init__(self, job: Job, count: int) -> None:
        self._job, self._last = job, [0] * count

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        self._work()
        self._last[slot] = sum(prompt) % LARGE["vocab_size"]
        return self._last[slot]

    def step(self) -> list[int]:
        self._work()
        self._last = [(token * 48271 + 1) % LARGE["vocab_size"] for token in self._last]
        return self._last

    def _work(self) -> None:
        self._job.step()
        if self._job.mismatches:
            raise RuntimeError(f"{self._job.mismatches} pages have other values than were written")


class Record:
    """Tokens, times and answers of the requests of a window."""

    def __init__(self, begin: float, end: float, vocabulary: int) -> None:
        self.begin, self.end, self._vocabulary = begin, end, vocabulary
        self._tokens, self._asked = 0, 0
        self._firsts: list[float] = []
        self._answers: Counter[tuple[int, str]] = Counter()

    def open(self) -> bool:
        return time.monotonic() < self.end

    def next(self) -> tuple[int, list[int]]:
        """Number and tokens of the next prompt."""
        number = self._asked % PROMPTS
        self._asked += 1
        return number, random.Random(number).choices(range(self._vocabulary), k=PROMPT_TOKENS)

    def token(self, count: int, now: float) -> None:
        if self.begin < now <= self.end:
            self._tokens += count

    def first(self, arrival: float, now: float) -> None:
        if self.begin <= arrival < self.end:
            self._firsts.append(now - arrival)

    def done(self, number: int, tokens: Sequence[int]) -> None:
        if len(tokens) == TOKENS:
            self._answers[number, hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]] += 1

    def told(self) -> dict[str, Any]:
        return {
            "rate": self._tokens / (self.end - self.begin), "first_ms": [round(each * 1e3, 3) for each in self._firsts],
            "answers": [(*each, count) for each, count in self._answers.items()],
        }  # fmt: skip


def shorter(slot: int, in_flight: int) -> int:
    """Tokens of a slot's first request."""
    return max(1, TOKENS * (slot + 1) // in_flight)


def serve(batch: Slots, in_flight: int, record: Record) -> None:
    """One window."""
    under_way: dict[int, tuple[int, list[int], int]] = {}
    since = dict.fromkeys(range(in_flight), time.monotonic())
    lengths = [shorter(slot, in_flight) for slot in range(in_flight)]
    while record.open() or under_way:
        for slot, arrival in list(since.items()) if record.open() else []:
            number, prompt = record.next()
            under_way[slot] = number, [batch.begin(slot, prompt)], lengths[slot]
            lengths[slot] = TOKENS
            now = time.monotonic()
            record.first(arrival, now)
            record.token(1, now)
            del since[slot]
        tokens, now = batch.step(), time.monotonic()
        for slot, (number, so_far, length) in list(under_way.items()):
            if len(so_far) < length:
                so_far.append(tokens[slot])
                record.token(1, now)
            if len(so_far) == length:
                record.done(number, so_far)
                del under_way[slot]
                since[slot] = now


class Batches:
    """A server by slots; one batch for each number of requests."""

    def __init__(self, program: str, where: str, size: int, numbers: Sequence[int]) -> None:
        self.versions: dict[str, str] = {}
        self._batches: dict[int, Slots]
        if program == "double":
            self.vocabulary = LARGE["vocab_size"]
            job = Job(size, 1.0)
            self._batches = {number: Double(job, number) for number in numbers}
            return
        import torch

        from nvshare.bench.workloads.serving_torch import Batch, Llama

        self.versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)  # on a processor two servers would wait for each other's threads
        model = Llama(torch.device(where), size)
        self.vocabulary = model.shape["vocab_size"]
        self._batches = {number: Batch(model, number) for number in numbers}

    def window(self, in_flight: int, record: Record) -> None:
        serve(self._batches[in_flight], in_flight, record)


class Vllm:
    """vLLM with weights of its own choice."""

    def __init__(self, size: int, numbers: Sequence[int]) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would be compiled here
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch")}
        self.vocabulary = LARGE["vocab_size"]
        weights = 2 * (2 * LARGE["vocab_size"] * LARGE["hidden_size"] + 973_000_000)
        self._folder = tempfile.TemporaryDirectory(prefix="nvshare-model-")
        about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192}
        more = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5}
        Path(self._folder.name, "config.json").write_text(json.dumps(LARGE | about | more), encoding="utf-8")
        sizes = sorted({1, *numbers, *(number // 2 for number in numbers)})
        arguments = AsyncEngineArgs(
            model=self._folder.name, load_format="dummy", skip_tokenizer_init=True, max_model_len=2 * PROMPT_TOKENS,
            max_num_seqs=max(numbers), enable_prefix_caching=False, gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=max(256 * MIB, size - weights - VLLM_REST),
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._engine = self._loop.run_until_complete(start())
        atexit.register(self._engine.shutdown)  # its own process ends in order

    def window(self, in_flight: int, record: Record) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._slot(record, shorter(slot, in_flight)) for slot in range(in_flight)))

        self._loop.run_until_complete(all_of_them())

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a request that is alone."""

        async def all_of_them() -> list[int]:
            return [token async for new in self._request(prompt, TOKENS) for token in new]

        return self._loop.run_until_complete(all_of_them())

    async def _slot(self, record: Record, length: int) -> None:
        """One request after the other."""
        while record.open():
            number, prompt = record.next()
            arrival, tokens = time.monotonic(), list[int]()
            async for new in self._request(prompt, length):
                now = time.monotonic()
                if new and not tokens:
                    record.first(arrival, now)
                record.token(len(new), now)
                tokens += new
            record.done(number, tokens)
            length = TOKENS

    async def _request(self, prompt: Sequence[int], length: int) -> AsyncIterator[Sequence[int]]:
        """Its tokens, as they come."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        async for part in self._engine.generate({"prompt_token_ids": list(prompt)}, how, f"{random.random()}"):
            yield part.outputs[0].token_ids


def main() -> int:
    """Command line."""
    if len(sys.argv) < 5 or sys.argv[1] not in {"torch", "vllm", "double"} or sys.argv[2] not in {"cuda", "cpu"}:
        sys.stderr.write("usage: python -m nvshare.bench.workloads.serving torch|vllm|double cuda|cpu MIB NUMBER...\n")
        return 2
    program, where, size, numbers = sys.argv[1], sys.argv[2], int(sys.argv[3]) * MIB, [int(n) for n in sys.argv[4:]]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what frameworks print
    try:
        server = Vllm(size, numbers) if program == "vllm" else Batches(program, where, size, numbers)
        for number in numbers:  # the last things that are compiled or allocated
            now = time.monotonic()
            server.window(number, Record(now, now + 0.1, server.vocabulary))
        print(json.dumps({"ready": True, "versions": server.versions}), file=answers, flush=True)
        for line in sys.stdin:
            word, in_flight, begin, end = line.split()
            if word != "window":
                raise ValueError(line)
            record = Record(float(begin), float(end), server.vocabulary)
            server.window(int(in_flight), record)
            print(json.dumps(record.told()), file=answers, flush=True)
    except (RuntimeError, CudaError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{program}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
