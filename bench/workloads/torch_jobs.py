"""The PyTorch workloads of `nvshare.bench.pairs` that are more than a loop over one kernel.

On a processor (`device` cpu) everything is small: only whether it runs is of interest there.

Invariants: the work of a step is the same in every process and at every time, so that steps are comparable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from nvshare.bench.workloads.models import VOCABULARY, Transformer
from nvshare.bench.workloads.steps import DATA_IN_PRODUCTS, Workload

SERVER_EVERY_S = 0.005
PRODUCTS_A_STEP = 64
DATA_WAIT_S = 0.010
"""About as long as the products of a step of `data`."""
PROMPT = 128


def _events(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """`mark` and `wait` of a workload."""
    if device.type == "cpu":
        return (lambda: None), (lambda event: None)

    def mark() -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    return mark, lambda event: event.synchronize()


def _autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def products(device: torch.device) -> Callable[[], None]:
    """64 bf16 products of 2048 cubed: saturates the card."""
    return _products(device, PRODUCTS_A_STEP)


def _products(device: torch.device, count: int, side: int = 2048) -> Callable[[], None]:
    side = side if device.type == "cuda" else 64
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    return step


def long(device: torch.device) -> Callable[[], None]:
    """8 bf16 products of 8192 cubed, 1.6 ms each."""
    return _products(device, 8, 8192)


def _graphed(make: Callable[[torch.device], Callable[[], None]], device: torch.device) -> Callable[[], None]:
    """A step as one CUDA graph."""
    step = make(device)
    if device.type == "cpu":
        return step
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda: graph.replay()


def _waited(make: Callable[[torch.device], Callable[[], None]], device: torch.device) -> Callable[[], None]:
    """The program waits for each step."""
    step, (mark, wait) = make(device), _events(device)

    def waited() -> None:
        step()
        wait(mark())

    return waited


def elementwise(device: torch.device, count: int = 1 << 28) -> Callable[[], None]:
    """One power of 2^28 doubles: a kernel of about 2 ms over all multiprocessors."""
    values = torch.rand(count if device.type == "cuda" else 1024, device=device, dtype=torch.float64) + 0.5
    out = torch.empty_like(values)

    def step() -> None:
        torch.pow(values, 1.37, out=out)

    return step


def memory(device: torch.device) -> Callable[[], None]:
    """Elementwise passes over 256 MiB: saturates the memory."""
    values = torch.zeros(64 << 20 if device.type == "cuda" else 1024, device=device)

    def step() -> None:
        for _ in range(16):
            values.add_(1.0)

    return step


def tiny(device: torch.device) -> Callable[[], None]:
    """200 tiny kernels: bound by launching."""
    values = torch.zeros(64, device=device)

    def step() -> None:
        for _ in range(200):
            values.add_(1.0)

    return step


def _transformer(device: torch.device) -> Transformer:
    size = {} if device.type == "cuda" else {"width": 64, "heads": 2, "layers": 2}
    model = Transformer(**size)
    model.to(device)
    return model


def decode(device: torch.device) -> Callable[[], None]:
    """One token of a sequence, batch 1, without a cache of keys; the host reads each token."""
    model = _transformer(device).to(torch.bfloat16).eval()
    tokens = torch.randint(VOCABULARY, (1, PROMPT), device=device)

    def step() -> None:
        nonlocal tokens
        with torch.inference_mode():
            token = model(tokens, last=True).argmax(dim=-1)
            tokens = torch.cat((tokens[:, 1:], token[:, None]), dim=1)
        token.item()

    return step


def train(device: torch.device) -> Callable[[], None]:
    """A training step of 8 x 512 tokens: forward, backward, AdamW."""
    model = _transformer(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (8, 512) if device.type == "cuda" else (2, 16)
    tokens = torch.randint(VOCABULARY, shape, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(device):
            logits = model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def cnn(device: torch.device) -> Callable[[], None]:
    """A training step of torchvision's ResNet-50, 32 images of 224 x 224."""
    import torchvision

    on_card = device.type == "cuda"
    model = torchvision.models.resnet50() if on_card else torchvision.models.resnet18()
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shape = (32, 3, 224, 224) if on_card else (2, 3, 32, 32)
    images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, shape[:1], device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(device):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def server(device: torch.device) -> Callable[[], None]:
    """One request: a batch of 8 through six layers of 1024."""
    layers = [torch.nn.Linear(1024, 1024, device=device) for _ in range(6)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    batch = torch.randn(8, 1024, device=device)

    def step() -> None:
        with torch.inference_mode():
            model(batch)

    return step


def data(device: torch.device) -> Callable[[], None]:
    """Waits for its data about half of each step, copies a batch to the card, computes, waits for the end."""
    compute = _products(device, DATA_IN_PRODUCTS * PRODUCTS_A_STEP if device.type == "cuda" else 1)
    on_host = torch.randn(32, 3, 224, 224, pin_memory=device.type == "cuda")
    on_device = torch.empty_like(on_host, device=device)
    mark, wait = _events(device)

    def step() -> None:
        time.sleep(DATA_WAIT_S)
        on_device.copy_(on_host, non_blocking=True)
        compute()
        wait(mark())

    return step


_wide = partial(elementwise, count=1 << 29)
JOBS: dict[str, Callable[[torch.device], Callable[[], None]]] = {
    "products": products, "graphed": partial(_graphed, products), "elementwise": elementwise, "memory": memory,
    "tiny": tiny, "decode": decode, "train": train, "cnn": cnn, "server": server, "data": data,
    "long": partial(_waited, long), "graphed_long": partial(_waited, partial(_graphed, long)), "wide": _wide,
    "graphed_wide": partial(_graphed, _wide),
}  # fmt: skip


def workload(name: str, where: str) -> Workload:
    """The workload of this name on `cuda` or `cpu`."""
    torch.manual_seed(7)
    device = torch.device(where)
    mark, wait = _events(device)
    return Workload(JOBS[name](device), mark, wait, SERVER_EVERY_S if name == "server" else None)
