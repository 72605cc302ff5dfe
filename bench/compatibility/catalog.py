"""Cases of the matrix in the order in which they run: cheap and telling ones first.

Invariants: a case that may run in `managed` mode takes little memory: with a limit of 96 MiB a program and two programs
at a time, the matrix never has more than 192 MiB of managed memory.  The programs of gigabytes run in `swap` and
`beyond`.

Non-goals: how a case is run (__main__.py), what it does (cases/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MODES: dict[str, tuple[str, ...]] = {
    "device": ("--memory", "device"),
    "managed": ("--memory", "managed", "--gpu-memory-limit", "96MiB"),
    "swap": ("--memory", "swap"),
    "beside": ("--memory", "swap"),
    "beyond": ("--memory", "swap"),
}
"""Memory modes, as options of `nvshare-run`.  `swap`, `beside` and `beyond` run when asked for.

`beside`: in `swap`, beside a training in PyTorch of a program's size.  `beyond`: in `swap`, beside a rival of 7/6 of a
program's size that works all the time, on a card of twice its size.
"""

NOT_MANAGED = frozenset({"device", "swap"})
SMALL = frozenset({"device", "managed", "swap"})
LARGE = frozenset({"swap", "beyond"})
SERVERS = LARGE | {"beside"}


@dataclass(frozen=True, slots=True)
class Case:
    """One row a mode.  `name`: GROUP.NAME, as the program calls it; `modules` must be installed."""

    row: str
    name: str
    modes: frozenset[str] = NOT_MANAGED
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = 40.0

    def chosen(self, mode: str, wanted: Sequence[str]) -> bool:
        """Whether it runs in a mode, if these are named (none: all)."""
        names = {self.row, self.name, self.name.partition(".")[0], self.name.rpartition(".")[2]}
        return mode in self.modes and (not wanted or not names.isdisjoint(wanted))


EVERYWHERE = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",  # deterministic, and small
    "CUBLASLT_WORKSPACE_SIZE": "1024",  # KiB
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true",
    "PYTHONWARNINGS": "ignore",
}
"""Environment with and without the hook."""


def _torch(row: str, name: str, limit_s: float = 40.0, *, small: bool = False, **environment: str) -> Case:
    modes = SMALL if small else NOT_MANAGED
    return Case(row, f"torch.{name}", modes, ("torch",), environment, limit_s)


def _jax(row: str, **environment: str) -> Case:
    return Case(row, "jax.training", modules=("jax",), environment=environment)


def _program(row: str, name: str, *modules: str, **environment: str) -> Case:
    """A program of gigabytes, on one card."""
    return Case(row, f"programs.{name}", LARGE, modules, {"CUDA_VISIBLE_DEVICES": "0", **environment}, 100.0)


def _server(row: str, name: str, module: str) -> Case:
    """A model server."""
    return Case(row, f"programs.{name}", SERVERS, (module,), {"CUDA_VISIBLE_DEVICES": "0"}, 240.0)


CASES = (
    Case("driver API, launches", "driver.launches", SMALL, ("numpy",)),
    Case("driver API, CUDA graph", "driver.graph", SMALL, ("numpy",)),
    Case("driver API, graph of one kernel", "driver.graph1", modules=("numpy",)),
    Case("CUDA C++, static cudart", "runtime", SMALL),
    _torch("PyTorch, training", "eager", small=True),
    _torch("PyTorch, launch-bound loop", "small"),
    _torch("PyTorch, CUDA graphs", "graphs", small=True),
    _torch("PyTorch, autocast", "autocast"),
    _torch("cuBLAS, cuDNN, cuFFT by PyTorch", "libraries"),
    Case("Triton, a kernel by itself", "triton.kernel", modules=("torch", "triton")),
    _torch("PyTorch, DataLoader workers and pinned memory", "loader"),
    Case("transformers, text generation", "transformers.generate", modules=("torch", "transformers"), limit_s=60.0),
    _torch("NCCL, all-reduce on two GPUs", "nccl", 20.0),
    Case("CuPy, default pool", "cupy.default", SMALL, ("cupy",)),
    Case("CuPy, asynchronous pool", "cupy.async", modules=("cupy",)),
    Case("CuPy, managed memory of its own", "cupy.managed", modules=("cupy",)),
    Case("Numba-CUDA", "numba.kernel", SMALL, ("numba",)),
    _jax("JAX, memory in advance", XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION="0.02"),
    _torch("PyTorch, expandable segments", "eager", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    _jax("JAX, memory on demand", XLA_PYTHON_CLIENT_PREALLOCATE="false"),
    _torch("PyTorch, torch.compile", "compile", 70.0),
    _program("llama.cpp, greedy tokens", "llama", "numpy"),
    _program("diffusers, UNet of SDXL", "unet", "torch", "diffusers"),
    _program("diffusers, DiT", "dit", "torch", "diffusers"),
    _program("diffusers, offloading by free memory", "offload", "torch", "diffusers", "accelerate"),
    _program("transformers, Llama under requests", "requests", "torch", "transformers"),
    _program("PyTorch, training of gigabytes", "training", "torch"),
    _program("JAX, default preallocation", "jax-default", "jax"),
    _program("tinygrad, training", "tinygrad", "tinygrad", DEV="CUDA"),
    _program("CuPy and PyTorch in one process", "notebook", "cupy", "torch"),
    _program("imitated vLLM, cache of 90 % of the card", "vllm-cache", "torch", "transformers"),
    _server("vLLM, greedy tokens", "vllm", "vllm"),
    _server("PyTorch, model server of 8 slots", "servers", "torch"),
    Case("Lupine, driver API of a remote program", "remote.driver.launches", modules=("numpy",)),
    Case("Lupine, PyTorch training in one thread", "remote.torch.one-thread", modules=("torch",), limit_s=60.0),
)
"""Names of programs are also those of the command line: `--case programs` names all of gigabytes."""
