"""Programs that people share a card with, whole and of gigabytes: those of `nvshare.bench.day`, and some more.

`vllm-cache` imitates vLLM's sizing, from its documentation: all that 90 % of the card leaves becomes the cache of keys
and values, in one allocation.  `vllm` is vLLM itself, with a cache of a fixed size.

Non-goals: weights from elsewhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from nvshare.bench.compatibility.cases import Outcome, Program, Skipped, size_bytes
from nvshare.bench.workloads import day_job, serving
from nvshare.bench.workloads.llama import GIB, LlamaMissingError

TOLERANCE = 1e-5
UTILISATION = 0.9
"""vLLM's default of `gpu_memory_utilization`."""
SLOTS = 8


def of_day(make: Callable[[int], day_job.Work], units: int = 3, tolerance: float = TOLERANCE) -> Program:
    """A program of the day: some units with pauses in which others work."""

    def check() -> Outcome:
        outcome = Outcome(tolerance)
        program = make(size_bytes())
        for seed in range(units):
            time.sleep(0.2)
            for part in program.unit(seed):
                outcome.bytes_of(numpy.asarray(part))
        return outcome

    return Program(check)


def llama() -> Program:
    """Tokens of llama.cpp."""

    def server(size: int) -> day_job.Work:
        try:
            made = day_job.LlamaServer(size)
        except LlamaMissingError as why:
            raise Skipped(str(why)) from None
        list(made.unit(0))  # a simulated GPU computes nothing: there, tokens follow from what the memory held before
        return made

    return of_day(server, tolerance=0.0)


def training() -> Program:
    """Losses of a training."""
    import torch

    # The backward passes of the other kernels add in any order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return of_day(day_job.Training, units=12)


class Offloaded:
    """Models that come to the card when they are used, and leave it, where free memory is less than they take.

    That decision by `mem_get_info` is ComfyUI's.
    """

    about: dict[str, Any] = {"program": "diffusers"}  # noqa: RUF012 (a constant)

    def __init__(self, size: int) -> None:
        import torch

        self._pipeline = day_job.Pipeline(size, "cpu")
        free, _ = torch.cuda.mem_get_info()
        if free < 64 * GIB:
            self._pipeline.diffusers.enable_model_cpu_offload()
        else:
            self._pipeline.diffusers.to("cuda")

    def unit(self, seed: int) -> Any:
        """An image."""
        yield self._pipeline.image(seed, 4)


class Dit:
    """A diffusion transformer of the size that is asked for, by class labels."""

    about: dict[str, Any] = {"program": "diffusers"}  # noqa: RUF012 (a constant)

    def __init__(self, size: int) -> None:
        import diffusers

        large = size >= GIB
        heads, width = (24, 128) if large else (2, 16)
        layer_bytes = 340 << 20  # of that width in half precision
        transformer = day_job.half_precision(
            lambda: diffusers.DiTTransformer2DModel(
                num_attention_heads=heads, attention_head_dim=width, in_channels=4, out_channels=8,
                num_layers=max(2, round(0.75 * size / layer_bytes)) if large else 2, sample_size=64 if large else 16,
            )
        )  # fmt: skip
        decoder = day_job.image_decoder(large, "cuda")
        self._pipeline: Any = diffusers.DiTPipeline(transformer, decoder, diffusers.DDIMScheduler())
        self._pipeline.set_progress_bar_config(disable=True)

    def unit(self, seed: int) -> Any:
        """An image."""
        import torch

        generator = torch.Generator(device="cuda").manual_seed(seed)
        yield self._pipeline([seed], num_inference_steps=4, generator=generator, output_type="np").images


class CupyAndTorch:
    """A notebook that uses CuPy and PyTorch in turns, and shares an array between them."""

    about: dict[str, Any] = {"program": "cupy, torch"}  # noqa: RUF012 (a constant)

    def __init__(self, size: int) -> None:
        import cupy
        import torch

        rows = max(1, size // (32 << 20))
        torch.manual_seed(97)
        self._table = cupy.random.RandomState(89).random_sample((rows, 1 << 20), dtype=cupy.float32)
        self._weights = torch.randn(rows, 1 << 10, 1 << 10, device="cuda")

    def unit(self, seed: int) -> Any:
        """Two cells."""
        import cupy
        import torch

        self._table = cupy.sqrt(self._table * 0.5 + 0.25)
        yield cupy.asnumpy(self._table[:, :: 1 << 10])
        self._weights = torch.tanh(self._weights) * 1.5
        yield self._weights[:, ::64].cpu().numpy()
        yield float(torch.as_tensor(self._table[:1], device="cuda").double().sum())


class VllmCache:
    """Weights of a third of the size that is asked for; all that is left of 90 % of the card becomes one cache."""

    about: dict[str, Any] = {"program": "transformers"}  # noqa: RUF012 (a constant)

    def __init__(self, size: int) -> None:
        import torch

        self._server = day_job.TransformersServer(size // 3)
        free, total = torch.cuda.mem_get_info()
        ours = int(UTILISATION * total) - torch.cuda.memory_reserved()
        self._cache = torch.empty(min(ours, int(0.97 * free)), dtype=torch.uint8, device="cuda")

    def unit(self, seed: int) -> Any:
        """An answer, with the cache filled before it and compared after it."""
        self._cache.fill_(17 + seed)
        yield from self._server.unit(seed)
        yield sum(int((part != 17 + seed).any()) for part in self._cache.split(GIB >> 2))


def prompt(seed: int) -> Sequence[int]:
    """A random one."""
    return random.Random(seed).choices(range(serving.LARGE["vocab_size"]), k=serving.PROMPT_TOKENS)


class Vllm:
    """vLLM with an engine in a process of its own; one request at a time, so that its tokens are repeatable."""

    about: dict[str, Any] = {"program": "vllm"}  # noqa: RUF012 (a constant)

    def __init__(self, size: int) -> None:
        self._server = serving.Vllm(size, [1])

    def unit(self, seed: int) -> Any:
        """An answer."""
        yield self._server.answer(prompt(seed))


class SlotServer:
    """The model server of `nvshare.bench.servers` in PyTorch alone, with a request in each of its slots."""

    about: dict[str, Any] = {"program": "torch"}  # noqa: RUF012 (a constant)

    def __init__(self, size: int) -> None:
        import torch

        from nvshare.bench.workloads.serving_torch import Batch, Llama

        torch.set_grad_enabled(False)
        self._batch = Batch(Llama(torch.device("cuda"), size), SLOTS)

    def unit(self, seed: int) -> Any:
        """Answers to all of them."""
        yield [self._batch.begin(slot, prompt(seed * SLOTS + slot)) for slot in range(SLOTS)]
        for _ in range(serving.TOKENS - 1):
            yield self._batch.step()


def jax_default() -> Program:
    """Matrices of a quarter of the size that is asked for, under the default preallocation of 75 % of the card."""
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX runs on {jax.default_backend()}, not on the GPU")
    side = 4096
    count = max(2, size_bytes() // 4 // (4 * side * side))

    def one(values: Any, matrix: Any) -> tuple[Any, Any]:
        return jnp.tanh(jnp.dot(values, matrix, precision="highest")), None

    step: Any = jax.jit(lambda matrices, values: jax.lax.scan(one, values, matrices)[0])

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        matrices = jax.random.normal(jax.random.key(73), (count, side, side), dtype=jnp.float32) * side**-0.5
        values = jax.random.normal(jax.random.key(79), (64, side), dtype=jnp.float32)
        for _ in range(12):
            values = step(matrices, values)
            outcome.bytes_of(numpy.asarray(values))
        return outcome

    return Program(check)


def tinygrad() -> Program:
    """Losses of a small network beside tensors of half of the size that is asked for.

    The environment sets DEV=CUDA: tinygrad's own driver would talk to the kernel module past libcuda.
    """
    from tinygrad import Tensor, dtypes, nn
    from tinygrad.helpers import Context

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        Tensor.manual_seed(83)
        with Context(TRAINING=1):
            weight = (Tensor.randn(256, 512) * 0.06).realize()
            last = (Tensor.randn(512, 64) * 0.04).realize()
            weight.requires_grad = last.requires_grad = True
            optimizer = nn.optim.Adam([weight, last], lr=1e-3)
            batch, wanted = Tensor.randn(64, 256).realize(), Tensor.randn(64, 64).realize()
            block = min(64 << 20, size_bytes() // 8)
            held = [
                Tensor.full((block,), float(number), dtype=dtypes.float32).contiguous().realize()
                for number in range(max(1, size_bytes() // 2 // (4 * block)))
            ]
            for _ in range(12):
                optimizer.zero_grad()
                loss = (batch.matmul(weight).relu().matmul(last) - wanted).square().mean().backward()
                optimizer.step()
                held = [(one + 1).contiguous().realize() for one in held]
                outcome.figure(float(loss.item()))
            for one in held:
                outcome.figure(float(one[::4096].sum().item()))
            outcome.bytes_of(weight.numpy())
        return outcome

    return Program(check)


CASES = {
    "llama": llama,
    "unet": lambda: of_day(lambda size: day_job.DiffusersImages(size, count=1, steps=4)),
    "dit": lambda: of_day(Dit),
    "offload": lambda: of_day(Offloaded),
    "requests": lambda: of_day(day_job.TransformersServer, tolerance=0.0),
    "training": training,
    "jax-default": jax_default,
    "tinygrad": tinygrad,
    "notebook": lambda: of_day(CupyAndTorch),
    "vllm-cache": lambda: of_day(VllmCache, tolerance=0.0),
    "vllm": lambda: of_day(Vllm, units=8, tolerance=0.0),
    "servers": lambda: of_day(SlotServer, units=8, tolerance=0.0),
}
