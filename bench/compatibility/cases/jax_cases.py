"""JAX; whether it takes memory in advance is its environment's business."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy

from nvshare.bench.compatibility.cases import Outcome, Program

TOLERANCE = 1e-5


def training() -> Program:
    """Gradient descent on a two-layer network, jitted."""
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX runs on {jax.default_backend()}, not on the GPU")

    def loss(weights: Any, batch: Any) -> Any:
        hidden = jnp.tanh(jnp.dot(batch, weights[0], precision="highest"))
        return jnp.mean(jnp.square(jnp.dot(hidden, weights[1], precision="highest") - 1.0))

    def descend(weights: Any, batch: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(weights, batch)
        return [weight - 0.1 * slope for weight, slope in zip(weights, slopes, strict=True)], value

    update = jax.jit(descend)

    def start() -> tuple[list[Any], Any]:
        source = numpy.random.default_rng(37)
        shapes = ((128, 256), (256, 32), (64, 128))
        made = [jnp.asarray(source.standard_normal(shape, dtype=numpy.float32) * 0.1) for shape in shapes]
        return made[:2], made[2]

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        weights, batch = start()
        for _ in range(50):
            weights, value = update(weights, batch)
            outcome.figure(float(value))
        for weight in weights:
            outcome.bytes_of(numpy.asarray(weight))
        return outcome

    state = list(start())

    def step() -> None:
        state[0], _ = update(state[0], state[1])

    return Program(check, step, lambda: jax.block_until_ready(state[0]))


CASES = {"training": training}
