"""A training job of gigabytes in PyTorch, and one in JAX that takes its default share of the card.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from nvshare.bench.compatibility.cases.program import Outcome, Program, size_bytes

STEPS = 12
BYTES_A_WEIGHT = 16
"""Weight, gradient and AdamW's two averages in single precision."""


def versions() -> dict[str, str]:
    """Versions for the record: of the framework that is in use."""
    return {name: version(name) for name in ("torch", "jax", "tinygrad") if name in sys.modules}


def training_model(size: int) -> Any:
    """A transformer whose weights, gradients and optimiser take about so many bytes, on the card."""
    from nvshare.bench.workloads.models import Transformer

    width = 1536 if size >= 1 << 30 else 64
    layer = 12 * width * width * BYTES_A_WEIGHT
    rest = 52_000 * width * BYTES_A_WEIGHT
    return Transformer(width=width, heads=width // 64, layers=max(2, round((size - rest) / layer)))


def pytorch() -> Program:
    """Losses and final weights of a few steps of AdamW."""
    import torch
    from torch.nn import functional

    from nvshare.bench.compatibility.cases.torch_cases import host

    def check() -> Outcome:
        outcome = Outcome(1e-5)
        torch.manual_seed(67)
        # The backward passes of the other kernels add in any order.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        with torch.device("cuda"):
            model = training_model(size_bytes())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        tokens = torch.randint(50_000, (2, 128), generator=torch.Generator().manual_seed(71)).cuda()
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            logits = model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            outcome.figure(float(loss.detach()))
        for parameter in list(model.parameters())[:4]:
            outcome.bytes_of(host(parameter))
        outcome.figure(float(sum(parameter.double().abs().sum() for parameter in model.parameters())))
        return outcome

    return Program(check, None, torch.cuda.synchronize)


def jax_default() -> Program:
    """Matrices of a quarter of the size that is asked for, under the default preallocation of 75 % of the card."""
    import jax
    import jax.numpy as jnp
    import numpy

    if jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX runs on {jax.default_backend()}, not on the GPU")
    side = 4096
    count = max(2, size_bytes() // 4 // (4 * side * side))

    def chain(matrices: Any, values: Any) -> Any:
        def one(values: Any, matrix: Any) -> tuple[Any, Any]:
            return jnp.tanh(jnp.dot(values, matrix, precision="highest")), None

        return jax.lax.scan(one, values, matrices)[0]

    step: Any = jax.jit(chain)

    def check() -> Outcome:
        outcome = Outcome(1e-5)
        matrices = jax.random.normal(jax.random.key(73), (count, side, side), dtype=jnp.float32) * side**-0.5
        values = jax.random.normal(jax.random.key(79), (64, side), dtype=jnp.float32)
        for _ in range(STEPS):
            values = step(matrices, values)
            outcome.bytes_of(numpy.asarray(values))
        return outcome

    return Program(check, None, lambda: None)


def tinygrad() -> Program:
    """Losses of a small network beside tensors of half of the size that is asked for.

    The environment sets DEV=CUDA: tinygrad's own driver would talk to the kernel module past libcuda.
    """
    from tinygrad import Tensor, dtypes, nn
    from tinygrad.helpers import Context

    def check() -> Outcome:
        outcome = Outcome(1e-5)
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
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = (batch.matmul(weight).relu().matmul(last) - wanted).square().mean().backward()
                optimizer.step()
                held = [(one + 1).contiguous().realize() for one in held]
                outcome.figure(float(loss.item()))
            for one in held:
                outcome.figure(float(one[::4096].sum().item()))
            outcome.bytes_of(weight.numpy())
        return outcome

    return Program(check, None, lambda: None)


CASES = {"pytorch": pytorch, "jax_default": jax_default, "tinygrad": tinygrad}
