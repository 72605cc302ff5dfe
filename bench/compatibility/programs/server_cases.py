"""Servers on PyTorch: transformers under requests that come at random, and vLLM's use of memory.

vLLM itself is too large for the machines that measure.  `vllm_cache` and `vllm_sleep` imitate, from its
documentation, its sizing (all that 90 % of the card leaves becomes the cache of keys and values, in one allocation) and
its sleep (memory by cuMemCreate, saved to the host and unmapped, mapped again at the same address on waking).

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from typing import Any

import torch
import transformers

from nvshare.bench.compatibility.cases.program import Outcome, Program, size_bytes
from nvshare.bench.compatibility.cases.torch_cases import host
from nvshare.bench.workloads.busy import Driver

GIB = 1 << 30
UTILISATION = 0.9
"""vLLM's default of `gpu_memory_utilization`."""
REQUESTS = 8


def versions() -> dict[str, str]:
    """Versions for the record."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def decoder(size: int) -> Any:
    """A Llama with about `size` bytes of random weights in half precision on the card."""
    width, inner, heads = (4096, 14336, 32) if size >= GIB else (64, 128, 4)
    layer = 2 * (2 * width * width + width * width // 2 + 3 * width * inner)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=heads // 4,
        num_hidden_layers=max(2, round(size / layer)), vocab_size=4096, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(53)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def generated(model: Any, prompt: Any, count: int) -> Any:
    """The prompt (a row of tokens) and the likeliest tokens after it."""
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip


def requests() -> Program:
    """A thread sends requests at random times, the server answers each by greedy tokens."""
    model = decoder(size_bytes())

    def check() -> Outcome:
        chance = random.Random(59)
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def send() -> None:
            for _ in range(REQUESTS):
                time.sleep(chance.expovariate(20))
                waiting.put(torch.tensor([[chance.randrange(4096) for _ in range(chance.randint(8, 200))]]))

        sender = threading.Thread(target=send)
        sender.start()
        outcome = Outcome()
        for _ in range(REQUESTS):
            outcome.bytes_of(generated(model, waiting.get().cuda(), 16).cpu().numpy())
        sender.join()
        return outcome

    prompt = torch.arange(16, device="cuda")[None]
    return Program(check, lambda: generated(model, prompt, 1), torch.cuda.synchronize)


def vllm_cache() -> Program:
    """Weights of a third of the size that is asked for; all that is left of 90 % of the card becomes one cache."""

    def check() -> Outcome:
        torch.cuda.empty_cache()
        model = decoder(size_bytes() // 3)
        free, total = torch.cuda.mem_get_info()
        ours = int(UTILISATION * total) - torch.cuda.memory_reserved()
        cache = torch.empty(min(ours, int(0.97 * free)), dtype=torch.uint8, device="cuda")
        outcome = Outcome()
        for turn in range(3):
            for part in cache.split(GIB):
                part.fill_(17 + turn)
            prompt = torch.arange(16, device="cuda")[None] + turn
            outcome.bytes_of(generated(model, prompt, 16).cpu().numpy())
            wrong = sum(bool((part != 17 + turn).any()) for part in cache.split(GIB >> 2))
            outcome.figure(float(wrong))
        return outcome

    return Program(check, None, torch.cuda.synchronize)


class _Property(ctypes.Structure):
    """CUmemAllocationProp for memory of one card."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("gpu", ctypes.c_int),
        ("rest", ctypes.c_uint64 * 2),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", ctypes.c_int), ("gpu", ctypes.c_int), ("flags", ctypes.c_int))


class Sleeper:
    """Memory that can leave the card and come back to its address."""

    PIECE = 256 << 20

    def __init__(self, size: int) -> None:
        torch.zeros(1, device="cuda")  # the context
        self._cuda = Driver()
        self._piece = min(self.PIECE, size // (2 << 20) * (2 << 20))
        self._count = size // self._piece
        self.size = self._count * self._piece
        self._address, self._handles = ctypes.c_uint64(), [ctypes.c_uint64() for _ in range(self._count)]
        self._cuda("cuMemAddressReserve", ctypes.byref(self._address), ctypes.c_size_t(self.size), 0, 0, 0)
        self._saved = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        self._map()

    def _pieces(self) -> Any:
        for number, handle in enumerate(self._handles):
            yield ctypes.c_uint64(self._address.value + number * self._piece), handle

    def _map(self) -> None:
        size, access = ctypes.c_size_t(self._piece), _Access(1, 0, 3)
        for address, handle in self._pieces():
            self._cuda("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(_Property(1, 0, 1, 0)), 0)
            self._cuda("cuMemMap", address, size, 0, handle, 0)
            self._cuda("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))

    def _copy(self, function: str, *ends: Any) -> None:
        self._cuda(function, *ends, ctypes.c_size_t(self.size))

    def write(self, tensor: Any) -> None:
        """Fills the memory."""
        self._copy("cuMemcpyDtoD_v2", self._address, ctypes.c_uint64(tensor.data_ptr()))

    def read(self) -> Any:
        """A copy of the memory as a tensor on the card."""
        tensor = torch.empty(self.size, dtype=torch.uint8, device="cuda")
        self._copy("cuMemcpyDtoD_v2", ctypes.c_uint64(tensor.data_ptr()), self._address)
        return tensor

    def sleep(self) -> None:
        """Saves everything and gives the card's memory back."""
        self._copy("cuMemcpyDtoH_v2", ctypes.c_void_p(self._saved.data_ptr()), self._address)
        for address, handle in self._pieces():
            self._cuda("cuMemUnmap", address, ctypes.c_size_t(self._piece))
            self._cuda("cuMemRelease", handle)

    def wake(self) -> None:
        """Brings it back."""
        self._map()
        self._copy("cuMemcpyHtoD_v2", self._address, ctypes.c_void_p(self._saved.data_ptr()))

    def close(self) -> None:
        """Gives memory and addresses back."""
        self.sleep()
        self._cuda("cuMemAddressFree", self._address, ctypes.c_size_t(self.size))


def vllm_sleep() -> Program:
    """Weights that sleep and wake several times."""

    def check() -> Outcome:
        outcome = Outcome()
        weights = Sleeper(size_bytes() // 6)
        torch.manual_seed(61)
        values = torch.randint(256, (weights.size,), dtype=torch.uint8, device="cuda")
        for _ in range(3):
            weights.write(values)
            weights.sleep()
            values = values.flip(0)
            weights.wake()
            back = weights.read()
            outcome.figure(float(torch.equal(back.flip(0), values)))
            outcome.bytes_of(host(back[:: max(1, back.numel() >> 20)]))
            del back
        weights.close()
        return outcome

    return Program(check, None, torch.cuda.synchronize)


CASES = {"requests": requests, "vllm_cache": vllm_cache, "vllm_sleep": vllm_sleep}
