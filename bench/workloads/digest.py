"""Programs whose results must not depend on sharing: `python -m nvshare.bench.workloads.digest torch|cupy [STEPS]`.

Deterministic by seed; prints one JSON object with a SHA-256 over everything computed, and how long it took.  Small:
below 100 MiB of device memory.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time


def torch_digest(steps: int) -> str:
    """Trains a small network, with matrix products, reductions, sorting and copies between."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # for determinism; and small, for the managed check
    import torch

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(11)
    seen = hashlib.sha256()
    for step in range(steps):
        batch = torch.randn(64, 256, generator=source)
        wanted = torch.randn(64, 64, generator=source).to(device)
        out = model(batch.to(device, non_blocking=True))
        loss = torch.nn.functional.mse_loss(out, wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            ordered = torch.sort(out.flatten()).values
            product = (out.to(torch.bfloat16).T @ out.to(torch.bfloat16)).float()
            seen.update(loss.detach().cpu().numpy().tobytes() + ordered.detach().cpu().numpy().tobytes())
            seen.update(product.detach().cpu().numpy().tobytes())
    for parameter in model.parameters():
        seen.update(parameter.detach().cpu().numpy().tobytes())
    return seen.hexdigest()


def cupy_digest(steps: int) -> str:
    """Elementwise kernels, a reduction-free scan, sorting, a kernel of its own, copies in streams of its own."""
    import cupy
    import numpy

    source = numpy.random.default_rng(5)
    own = cupy.RawKernel(
        'extern "C" __global__ void turn(float *a, int n)'
        "{ int i = blockDim.x * blockIdx.x + threadIdx.x; if (i < n) a[i] = a[i] * 0.5f + (float)(i % 7); }",
        "turn",
    )
    values = cupy.asarray(source.standard_normal(1 << 18, dtype=numpy.float32))
    seen = hashlib.sha256()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for step in range(steps):
            fresh = cupy.asarray(source.standard_normal(1 << 12, dtype=numpy.float32))
            values[: fresh.size] += fresh
            own((values.size // 256,), (256,), (values, values.size))
            if step % 50 == 0:
                seen.update(cupy.asnumpy(cupy.sort(values)).tobytes())
                seen.update(cupy.asnumpy(cupy.cumsum(values.astype(cupy.int64))).tobytes())
        seen.update(cupy.asnumpy(values).tobytes())
    return seen.hexdigest()


def main() -> int:
    """Command line."""
    kinds = {"torch": torch_digest, "cupy": cupy_digest}
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in kinds:
        sys.stderr.write("usage: python -m nvshare.bench.workloads.digest torch|cupy [STEPS]\n")
        return 2
    start = time.monotonic()
    digest = kinds[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) == 3 else 2000)
    print(json.dumps({"digest": digest, "seconds": round(time.monotonic() - start, 2)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
