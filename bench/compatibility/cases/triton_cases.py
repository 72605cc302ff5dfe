"""A Triton kernel by itself."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nvshare.bench.compatibility.cases import Outcome, Program


def _blend(left, right, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    a = tl.load(left + offsets, mask=inside)
    b = tl.load(right + offsets, mask=inside)
    tl.store(out + offsets, a * 0.5 + tl.sin(b), mask=inside)


def blend() -> Program:
    """An elementwise kernel, launched by Triton's own launcher."""
    kernel: Any = triton.jit(_blend)
    source = torch.Generator().manual_seed(23)
    left, right = (torch.randn(1 << 16, generator=source).cuda() for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        kernel[(left.numel() // 1024,)](left, right, out, left.numel(), BLOCK=1024)

    def check() -> Outcome:
        outcome = Outcome()
        for _ in range(50):
            step()
        outcome.bytes_of(out.cpu().numpy())
        return outcome

    return Program(check, step, torch.cuda.synchronize)


CASES = {"kernel": blend}
