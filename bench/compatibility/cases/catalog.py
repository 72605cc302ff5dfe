"""Cases of the matrix in the order in which they run: cheap and telling ones first.

Invariants: a case that may run in `managed` mode takes little memory: with a limit of 96 MiB a program and two programs
at a time, the matrix never has more than 192 MiB of managed memory.

Non-goals: how a case is run (bench/compatibility.py), what it does (the modules beside this).
"""

from __future__ import annotations

from dataclasses import dataclass, field

MANAGED_LIMIT = "96MiB"

MODES: dict[str, tuple[str, ...]] = {
    "device": ("--memory", "device"),
    "managed": ("--memory", "managed", "--gpu-memory-limit", MANAGED_LIMIT),
    "swap": ("--memory", "swap"),
}
"""Memory modes, as options of `nvshare-run`.  `swap` runs when asked for."""

NOT_MANAGED = frozenset({"device", "swap"})
SMALL = frozenset({"device", "managed", "swap"})


@dataclass(frozen=True, slots=True)
class Case:
    """One row a mode.  `name`: how its program calls it."""

    row: str
    name: str
    modes: frozenset[str] = NOT_MANAGED
    limit_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share a process.  `modules` must be installed; `build`: replay or runtime, else a framework's host."""

    name: str
    cases: tuple[Case, ...]
    modules: tuple[str, ...] = ()
    build: str = ""
    environment: dict[str, str] = field(default_factory=dict)


EVERYWHERE = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",  # deterministic, and small
    "CUBLASLT_WORKSPACE_SIZE": "1024",  # KiB
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true",
    "PYTHONWARNINGS": "ignore",
}
"""Environment with and without the hook."""

FIRST = (
    Group(
        "driver",
        (
            Case("driver API, launches", "launches", SMALL),
            Case("driver API, CUDA graph", "graph", SMALL),
            Case("driver API, graph of one kernel", "graph1"),
        ),
        build="replay",
    ),
    Group("runtime", (Case("CUDA C++, static cudart", "runtime", SMALL),), build="runtime"),
    Group(
        "torch",
        (
            Case("PyTorch, training", "torch.eager", SMALL),
            Case("PyTorch, launch-bound loop", "torch.small"),
            Case("PyTorch, CUDA graphs", "torch.graphs", SMALL),
            Case("PyTorch, autocast", "torch.autocast"),
            Case("cuBLAS, cuDNN, cuFFT by PyTorch", "torch.libraries"),
            Case("Triton, a kernel by itself", "triton.kernel"),
            Case("PyTorch, DataLoader workers and pinned memory", "torch.loader"),
            Case("transformers, text generation", "transformers.generate", limit_s=60.0),
            Case("NCCL, all-reduce on two GPUs", "torch.nccl", limit_s=20.0),
        ),
        modules=("torch",),
    ),
    Group(
        "cupy",
        (
            Case("CuPy, default pool", "cupy.default", SMALL),
            Case("CuPy, asynchronous pool", "cupy.async"),
            Case("CuPy, managed memory of its own", "cupy.managed"),
        ),
        modules=("cupy",),
    ),
)
"""Groups that run in every mode before the others begin."""

THEN = (
    Group("numba", (Case("Numba-CUDA", "numba.kernel", SMALL),), modules=("numba",)),
    Group(
        "jax",
        (Case("JAX, memory in advance", "jax.training"),),
        modules=("jax",),
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02"},
    ),
    Group(
        "torch-expandable",
        (Case("PyTorch, expandable segments", "torch.eager"),),
        modules=("torch",),
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    Group(
        "jax-demand",
        (Case("JAX, memory on demand", "jax.training"),),
        modules=("jax",),
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    Group("torch-compile", (Case("PyTorch, torch.compile", "torch.compile", limit_s=70.0),), modules=("torch",)),
)
"""After the start-up times."""
