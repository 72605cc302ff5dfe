"""Cases of the matrix in the order in which they run: cheap and telling ones first.

Invariants: a case that may run in `managed` mode takes little memory: with a limit of 96 MiB a program and two programs
at a time, the matrix never has more than 192 MiB of managed memory.  The programs of gigabytes run in `swap` and
`beyond`.

Non-goals: how a case is run (bench/compatibility.py), what it does (the modules beside this).
"""

from __future__ import annotations

from dataclasses import dataclass, field

MANAGED_LIMIT = "96MiB"

MODES: dict[str, tuple[str, ...]] = {
    "device": ("--memory", "device"),
    "managed": ("--memory", "managed", "--gpu-memory-limit", MANAGED_LIMIT),
    "swap": ("--memory", "swap"),
    "beyond": ("--memory", "swap"),
}
"""Memory modes, as options of `nvshare-run`.  `swap` and `beyond` run when asked for.

`beyond`: in `swap`, beside a rival of 7/6 of a program's size that works all the time, on a card of twice its size.
"""

NOT_MANAGED = frozenset({"device", "swap"})
SMALL = frozenset({"device", "managed", "swap"})
LARGE = frozenset({"swap", "beyond"})


@dataclass(frozen=True, slots=True)
class Case:
    """One row a mode.  `name`: how its program calls it."""

    row: str
    name: str
    modes: frozenset[str] = NOT_MANAGED
    limit_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share a process.  `modules` must be installed; `build`: replay or runtime, else a framework's host.

    `module`: the one with the cases, where it is not named after the first of `modules`.
    """

    name: str
    cases: tuple[Case, ...]
    modules: tuple[str, ...] = ()
    build: str = ""
    module: str = ""
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


def _program(name: str, row: str, case: str, *modules: str, **environment: str) -> Group:
    """A program of programs/, in a process of its own, on one card."""
    one = {"CUDA_VISIBLE_DEVICES": "0", **environment}
    case_of = Case(row, case, LARGE, limit_s=100.0)
    return Group(name, (case_of,), modules, module=case.partition(".")[0], environment=one)


PROGRAMS = (
    _program("llama", "llama.cpp, greedy tokens", "llama.greedy", "numpy"),
    _program("unet", "diffusers, UNet of SDXL", "diffusers.unet", "torch", "diffusers"),
    _program("dit", "diffusers, DiT", "diffusers.dit", "torch", "diffusers"),
    _program(
        "offload", "diffusers, offloading by free memory", "diffusers.offloaded", "torch", "diffusers", "accelerate"
    ),
    _program("requests", "transformers, Llama under requests", "server.requests", "torch", "transformers"),
    _program("training", "PyTorch, training of gigabytes", "training.pytorch", "torch"),
    _program("jax-default", "JAX, default preallocation", "training.jax_default", "jax"),
    _program("tinygrad", "tinygrad, training", "training.tinygrad", "tinygrad", DEV="CUDA"),
    _program("notebook", "notebook, CuPy and PyTorch", "notebook.cupy_torch", "nbclient", "ipykernel", "cupy", "torch"),
    _program("vllm-cache", "imitated vLLM, cache of 90 % of the card", "server.vllm_cache", "torch", "transformers"),
    _program("vllm-sleep", "imitated vLLM, sleep and wake", "server.vllm_sleep", "torch", "transformers"),
)
"""Programs of gigabytes, in the modes `swap` and `beyond`.  `--case programs` names all of them."""
