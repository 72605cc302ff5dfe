"""Jobs of programs with PyTorch, one a process: `python framework_jobs.py JOB [--mib N] [--rounds N]`.

The Python that has the frameworks runs this file, so it imports nothing of nvshare.  Protocol: a line when the job is
ready, a line of input, a line when the job is done.  `--mib` of GPU memory hold a pattern that is compared afterwards.

Invariants: no job depends on a value that a kernel has written, because the simulated GPU computes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

SIDE = 256
BATCH = 32


@contextmanager
def _ended() -> Iterator[None]:
    """The work of the block has ended, without an error."""
    import torch

    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _network() -> Any:
    from torch import nn

    parts = (nn.Linear(SIDE, 2 * SIDE), nn.GELU(), nn.LayerNorm(2 * SIDE), nn.Linear(2 * SIDE, SIDE))
    return nn.Sequential(*parts).to("cuda")


def _random(*shape: int, **more: Any) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", **more)


def products() -> None:
    """Matrix products in six types."""
    import torch

    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        one = _random(SIDE, SIDE).to(kind)
        torch.nn.functional.linear(one @ one, torch.bmm(one[None], one[None])[0], one[0])
    eight = torch.ones(64, 64, dtype=torch.int8, device="cuda")
    torch._int_mm(eight, eight)
    small, scale = eight.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    torch._scaled_mm(small, small.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def training() -> None:
    """Steps of AdamW in four variants with autocast and a gradient scaler."""
    import torch

    for options in ({}, {"fused": True}, {"foreach": False}, {"capturable": True}):
        network = _network()
        optimizer = torch.optim.AdamW(network.parameters(), **options)
        scaler = torch.amp.GradScaler()
        for kind in (torch.bfloat16, torch.float16):
            for _ in range(2):
                with torch.autocast("cuda", dtype=kind):
                    loss = torch.nn.functional.mse_loss(network(_random(BATCH, SIDE)), _random(BATCH, SIDE))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        loss.item()


def attention() -> None:
    """Scaled dot-product attention by four backends, forward and backward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = _random(2, 4, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)), _ended():
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()


def graph() -> None:
    """A training step as a CUDA graph, and graphed callables."""
    import torch

    network, given, wanted = _network(), _random(BATCH, SIDE), _random(BATCH, SIDE)
    optimizer = torch.optim.AdamW(network.parameters(), capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(network(given), wanted).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    for _ in range(5):
        captured.replay()
    graphed = torch.cuda.make_graphed_callables(_network(), (given.clone(),))
    graphed(given).sum().backward()


def compiled() -> None:
    """torch.compile, also with graphs of its own."""
    import torch

    network = _network()
    for mode in (None, "reduce-overhead"):
        torch.compiler.reset()
        function = torch.compile(network, mode=mode)
        with _ended():
            for _ in range(4):
                function(_random(BATCH, SIDE)).sum().backward()


def kernels() -> None:
    """Triton's kernels: a product, a cooperative launch, a cluster of blocks."""
    import torch

    # Triton reads the source of a kernel from a file.
    source = (
        "import triton\nimport triton.language as tl\n@triton.jit\ndef dot(a, b, c, N: tl.constexpr):\n"
        "    i = tl.arange(0, N)\n    at = i[:, None] * N + i[None, :]\n"
        "    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "one_kernel.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, folder)
        import one_kernel  # type: ignore[import-not-found]

        a, b, c = (torch.empty(64, 64, device="cuda", dtype=kind) for kind in (torch.float16,) * 2 + (torch.float32,))
        for options in ({}, {"launch_cooperative_grid": True}, {"num_ctas": 2}, {"launch_pdl": True}):
            with _ended():
                one_kernel.dot[(2 * options.get("num_ctas", 1),)](a, b, c, N=64, **options)


def libraries() -> None:
    """cuDNN, cuFFT, cuSPARSE, cuRAND and NVRTC."""
    import torch
    from torch import nn

    convolution, norm = nn.Conv2d(3, 16, 3, padding=1).to("cuda"), nn.BatchNorm2d(16).to("cuda")
    for lower in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=lower), _ended():
            norm(convolution(_random(8, 3, 64, 64))).sum().backward()
    with _ended():
        nn.LSTM(32, 32).to("cuda")(_random(4, 2, 32))[0].sum().backward()
    with _ended():
        torch.fft.fft(_random(64, 128))
        torch.fft.rfft2(_random(64, 128))
    with _ended():
        rows, columns = torch.tensor([0, 1, 2, 2, 2]), torch.tensor([1, 0])
        sparse = torch.sparse_csr_tensor(rows, columns, torch.ones(2), (4, 4))
        sparse.to("cuda") @ torch.ones(4, 4, device="cuda")
    with _ended():
        torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x * x + x; }")(_random(64))


def allocator() -> None:
    """Memory that comes and goes, and an allocation beyond the card."""
    import torch

    for _ in range(3):
        several = [_random(1 << 18) for _ in range(20)]
        del several[::2]
        try:
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
            raise AssertionError("4 TiB were allocated")
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()


def collective() -> None:
    """NCCL with one rank."""
    import torch
    from torch import distributed

    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/rendezvous"
        card = torch.device("cuda", 0)
        distributed.init_process_group("nccl", init_method=where, rank=0, world_size=1, device_id=card)
        values = torch.ones(16, device="cuda")
        with _ended():
            distributed.all_reduce(values)
            distributed.all_gather_into_tensor(torch.empty_like(values), values)
            distributed.barrier()
        distributed.destroy_process_group()


def fork() -> None:
    """A child that is forked after the parent has asked whether there is a card, which must not initialise CUDA."""
    import torch

    assert torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
    if (child := os.fork()) == 0:
        try:
            products()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"


def transformer() -> None:
    """A training step of a small Llama by transformers, and a loop of decoding with a cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", dtype=torch.bfloat16)
    tokens = torch.zeros(2, 64, dtype=torch.long).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        told = model(input_ids=tokens, use_cache=True)
        for _ in range(8):
            told = model(input_ids=tokens[:, :1], past_key_values=told.past_key_values, use_cache=True)


def vllm(eager: bool, mib: int) -> None:
    """An engine of vLLM with a cache of this size, in a process of its own, and a few requests."""
    from vllm import LLM, SamplingParams

    about = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
        "max_position_embeddings": 512, "torch_dtype": "bfloat16",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(about), encoding="utf-8")
        engine = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8,
            enforce_eager=eager, gpu_memory_utilization=0.05, kv_cache_memory_bytes=mib << 20,
        )  # fmt: skip
        how = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        for _ in range(8):
            told = engine.generate([{"prompt_token_ids": list(range(16))}] * 4, how, use_tqdm=False)
            assert [len(each.outputs[0].token_ids) for each in told] == [16] * 4


ALL = (
    products, training, attention, graph, compiled, kernels, libraries, allocator, collective, fork, transformer,
)  # fmt: skip
JOBS: dict[str, Callable[[], None]] = {each.__name__: each for each in ALL}
ENGINES: dict[str, Callable[[int], None]] = {"vllm_eager": partial(vllm, True), "vllm_graphs": partial(vllm, False)}
"""Jobs whose own memory is what `--mib` says: a process that has used the card, or PyTorch's threads, cannot fork."""


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def main() -> None:
    """One job, `--rounds` times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=sorted({**JOBS, **ENGINES}))
    parser.add_argument("--mib", type=int, default=0, help="of the pattern in GPU memory")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    import torch

    # A row is 16 MiB, so that the pattern itself takes little memory.
    pattern, ballast = None, []
    if options.job in ENGINES:
        work: Callable[[], None] = partial(ENGINES[options.job], options.mib)
    else:
        work, pattern = JOBS[options.job], torch.arange(1 << 21)
        ballast = [pattern.to("cuda") for _ in range(options.mib // 16)]
    names = ("torch", "triton", "transformers", "vllm")
    versions = {name: importlib.metadata.version(name) for name in names if _installed(name)}
    say(ready=True, versions=versions)
    sys.stdin.readline()
    began = time.monotonic()
    for _ in range(options.rounds):
        with _ended():
            work()
    kept = all(torch.equal(each.cpu(), pattern) for each in ballast)
    say(seconds=round(time.monotonic() - began, 2), kept=kept)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
