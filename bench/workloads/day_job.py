"""Programs that people share a card with, whole and of gigabytes, with random weights; one for `nvshare.bench.day`.

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
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from nvshare.bench.workloads.busy import CudaError, Driver
from nvshare.bench.workloads.llama import GIB, Llama, LlamaMissingError, model_file
from nvshare.bench.workloads.resident import MIB, Job

PROMPT_TOKENS, TOKENS, VOCABULARY = 128, 64, 4096


class Work(Protocol):
    """A unit of work in parts; the first one is there when a user sees something.  `about` describes the program."""

    about: dict[str, Any]

    def unit(self, seed: int) -> Iterator[Any]:
        """The parts, as they are finished: numbers or NumPy arrays."""


class Double:
    """Without a framework: each part writes all of the memory."""

    def __init__(self, name: str, size: int) -> None:
        self.about = {"program": "double"}
        self._parts, step_ms = {"server": (8, 2.0), "images": (1, 20.0), "notebook": (1, 5.0)}.get(name, (1, 5.0))
        self._job = Job(size, step_ms)

    def unit(self, seed: int) -> Iterator[int]:
        """Steps of the job."""
        for part in range(self._parts):
            self._job.step()
            if self._job.mismatches:
                raise RuntimeError(f"{self._job.mismatches} pages have other values than were written")
            yield part


class LlamaServer:
    """llama.cpp, one request at a time."""

    def __init__(self, size: int) -> None:
        directory = Path(os.environ.get("NVSHARE_BENCH_MODELS", tempfile.gettempdir()))
        self._llama = Llama(model_file(directory, size))
        self.about = {"program": "llama.cpp"}

    def unit(self, seed: int) -> Iterator[int]:
        """Greedy tokens after a random prompt."""
        chance = random.Random(seed)
        yield from self._llama.generate(chance.choices(range(self._llama.vocabulary), k=PROMPT_TOKENS), TOKENS)


def half_precision(make: Callable[[], Any], device: str = "cuda") -> Any:
    """The model that `make` gives, in half precision on the device, with the same random weights every time."""
    import torch

    torch.manual_seed(43)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


class TransformersServer:
    """A Llama of transformers with about `size` bytes of weights, one request at a time."""

    def __init__(self, size: int, why: str = "") -> None:
        import transformers

        width, inner, heads = (4096, 14336, 32) if size >= GIB else (64, 128, 4)
        layer = 2 * (2 * width * width + width * width // 2 + 3 * width * inner)
        config = transformers.LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=heads // 4,
            num_hidden_layers=max(2, round(size / layer)), vocab_size=VOCABULARY, max_position_embeddings=2048,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self._model = half_precision(lambda: transformers.LlamaForCausalLM(config))
        self.about = {"program": "transformers", "why": why}

    def unit(self, seed: int) -> Iterator[int]:
        """Greedy tokens after a random prompt."""
        import torch

        chance = random.Random(seed)
        tokens, cache = torch.tensor([chance.choices(range(VOCABULARY), k=PROMPT_TOKENS)], device="cuda"), None
        with torch.inference_mode():
            for _ in range(TOKENS):
                out = self._model(tokens, past_key_values=cache, use_cache=True)
                cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
                yield int(tokens.item())


class Pipeline:
    """Text to image with the UNet of Stable Diffusion XL, 5 GiB; a small one below a GiB.  Prompts are random."""

    def __init__(self, size: int, device: str = "cuda") -> None:
        import diffusers
        import torch

        large = size >= GIB
        context = 2048 if large else 32
        shape: dict[str, Any] = {
            "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20), "sample_size": 96,
        } if large else {
            "block_out_channels": (32, 64, 64), "transformer_layers_per_block": 1, "attention_head_dim": 8,
            "sample_size": 16,
        }  # fmt: skip
        unet = half_precision(
            lambda: diffusers.UNet2DConditionModel(
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=context, use_linear_projection=True, layers_per_block=2, **shape,
            ), device,
        )  # fmt: skip
        self.diffusers: Any = diffusers.StableDiffusionPipeline(
            vae=image_decoder(large, device), text_encoder=None, tokenizer=None, unet=unet,
            scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
        self.diffusers.set_progress_bar_config(disable=True)
        chance = torch.Generator().manual_seed(47)
        self._prompt = torch.randn(1, 77, context, generator=chance, dtype=torch.bfloat16)

    def image(self, seed: int, steps: int) -> Any:
        """One image as a NumPy array."""
        import torch

        # The device of a pipeline that offloads its models is where they are computed.
        prompt = self._prompt.to(self.diffusers._execution_device)
        images = self.diffusers(
            prompt_embeds=prompt, negative_prompt_embeds=torch.zeros_like(prompt), num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed), output_type="pt",
        ).images  # fmt: skip
        if not torch.isfinite(images).all():
            raise RuntimeError("the image has values that are no numbers")
        return images.float().cpu().numpy()


def image_decoder(large: bool, device: str) -> Any:
    """The VAE of Stable Diffusion, or a small one."""
    import diffusers

    widths = (128, 256, 512, 512) if large else (32, 32)
    return half_precision(
        lambda: diffusers.AutoencoderKL(
            block_out_channels=widths, layers_per_block=2, latent_channels=4, sample_size=512,
            down_block_types=("DownEncoderBlock2D",) * len(widths), up_block_types=("UpDecoderBlock2D",) * len(widths),
        ), device,
    )  # fmt: skip


class DiffusersImages:
    """Pipelines one after the other, as base and refiner, in `size` bytes with their activations."""

    def __init__(self, size: int, count: int = 0, steps: int = 10) -> None:
        if not count:
            count = max(1, (size - 4 * GIB) // (5 * GIB)) if size >= GIB else 2
        self._pipelines, self._steps = [Pipeline(size) for _ in range(count)], steps
        self.about = {"program": "diffusers"}

    def unit(self, seed: int) -> Iterator[Any]:
        """An image."""
        images = [pipeline.image(seed, self._steps) for pipeline in self._pipelines]
        yield images[-1]


class Notebook:
    """Tables that a cell goes over when somebody comes back to it."""

    def __init__(self, size: int) -> None:
        import torch

        self._tables = [torch.ones(64 << 20, device="cuda") for _ in range(max(1, size // (256 * MIB)))]
        self.about = {"program": "torch"}

    def unit(self, seed: int) -> Iterator[float]:
        """A cell."""
        for _ in range(20):
            for table in self._tables:
                table.mul_(-1)
        yield float(sum(table[::4096].abs().sum() for table in self._tables))


class Training:
    """AdamW on a transformer that takes about `size` bytes with its gradients, optimiser and activations."""

    def __init__(self, size: int) -> None:
        import torch

        from nvshare.bench.workloads.models import Transformer

        width = 1536 if size >= GIB else 64
        weight_bytes = 16  # itself, its gradient and two averages in single precision
        layer, rest = (count * width * weight_bytes for count in (12 * width, 52_000))
        layers = max(2, round((size * 7 / 8 - rest) / layer))
        torch.manual_seed(67)
        with torch.device("cuda"):
            self._model = Transformer(width=width, heads=width // 64, layers=layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self.about = {"program": "torch"}

    def unit(self, seed: int) -> Iterator[float]:
        """A step."""
        import torch
        from torch.nn import functional

        self._optimizer.zero_grad(set_to_none=True)
        tokens = torch.randint(50_000, (4, 256), generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self._model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        yield float(loss.detach())


class Ballast:
    """All of the card but so much."""

    def __init__(self, left: int) -> None:
        self.about = {"program": "ballast"}
        cuda = Driver()
        cuda.use()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if (size := free.value - left) > 0:
            cuda.memory(size)

    def unit(self, seed: int) -> Iterator[int]:
        """Nothing."""
        yield 0


def work(name: str, where: str, size: int) -> Work:
    """The program of this name."""
    if name == "ballast":
        return Ballast(size)
    if where == "driver":
        return Double(name, size)
    if name == "server":
        try:
            return LlamaServer(size)
        except LlamaMissingError as why:
            return TransformersServer(size, str(why))
    if name == "images":
        return DiffusersImages(size)
    return Notebook(size) if name == "notebook" else Training(size)


def unit(program: Work, seed: int) -> dict[str, Any]:
    """One unit, timed."""
    first, seen, count = None, hashlib.sha256(), 0
    for part in program.unit(seed):
        first = first or time.monotonic()
        seen.update(repr(part).encode() if isinstance(part, int | float) else part.tobytes())
        count += 1
    return {"first": first, "end": time.monotonic(), "count": count, "digest": seen.hexdigest()}


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
        program = work(sys.argv[1], sys.argv[2], int(sys.argv[3]) * MIB)
        if sys.argv[1] != "ballast":
            unit(program, 0)  # compiles, fills caches and the optimiser
        if "torch" in sys.modules:
            program.about["pytorch_mib"] = sys.modules["torch"].cuda.memory_reserved() // MIB
        print(json.dumps({"ready": True, **program.about}), file=answers, flush=True)
        for line in sys.stdin:
            word, value = line.split()
            told = unit(program, int(value)) if word == "unit" else steps(program, float(value))
            print(json.dumps(told), file=answers, flush=True)
    except (RuntimeError, CudaError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{sys.argv[1]}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
