"""PyTorch: eager training, autocast, libraries, CUDA graphs, DataLoader, compile; and all-reduce over two GPUs."""

from __future__ import annotations

from typing import Any

import torch

from nvshare.bench.compatibility.cases import Outcome, Program, Skipped

TOLERANCE = 1e-5
"""Should bytes differ: PyTorch's own rtol for float32 in `torch.testing` is 1.3e-6 an element; these are sums."""

torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = True
torch.use_deterministic_algorithms(True, warn_only=True)


def host(tensor: Any) -> Any:
    """The tensor as a NumPy array."""
    return tensor.detach().float().cpu().numpy()


class Training:
    """A small network on random data, Adam."""

    def __init__(self, *, autocast: bool) -> None:
        torch.manual_seed(7)
        self.autocast = autocast
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        source = torch.Generator().manual_seed(11)
        self.batches = [torch.randn(64, 256, generator=source).cuda() for _ in range(8)]
        self.wanted = torch.randn(64, 64, generator=source).cuda()
        self.steps = 0

    def step(self) -> Any:
        """The loss of one step."""
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.autocast):
            out = self.model(self.batches[self.steps % 8])
            loss = torch.nn.functional.mse_loss(out.float(), self.wanted)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss


def training(*, autocast: bool) -> Program:
    """The loss curve and the final weights."""

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        run = Training(autocast=autocast)
        for loss in [run.step() for _ in range(60)]:
            outcome.figure(float(loss))
        for parameter in run.model.parameters():
            outcome.bytes_of(host(parameter))
        return outcome

    timed = Training(autocast=autocast)
    return Program(check, timed.step, torch.cuda.synchronize)


def one_thread() -> Program:
    """The small network, its backward pass in the calling thread: Lupine does not order calls of several threads."""
    torch.autograd.set_multithreading_enabled(False)
    return training(autocast=False)


def small() -> Program:
    """200 tiny elementwise kernels a step: bound by launching."""
    tiny = torch.zeros(64, device="cuda")

    def step() -> None:
        for _ in range(200):
            tiny.add_(1.0)

    def check() -> Outcome:
        outcome = Outcome()
        tiny.zero_()
        for _ in range(10):
            step()
        outcome.bytes_of(host(tiny))
        return outcome

    return Program(check, step, torch.cuda.synchronize)


def libraries() -> Program:
    """cuBLAS and cuBLASLt, cuDNN, cuFFT."""
    source = torch.Generator().manual_seed(3)
    image = torch.randn(4, 16, 64, 64, generator=source).cuda()
    filters = torch.randn(32, 16, 3, 3, generator=source).cuda()
    matrix = torch.randn(512, 512, generator=source).cuda()
    bias = torch.randn(512, generator=source).cuda()

    def step() -> list[Any]:
        half = matrix.to(torch.bfloat16)
        return [
            torch.nn.functional.conv2d(image, filters, padding=1),
            torch.fft.rfft2(image).abs(),
            torch.fft.ifft(torch.fft.fft(matrix)).real,
            matrix @ matrix,
            torch.nn.functional.linear(half, half, bias.to(torch.bfloat16)),
            torch.linalg.qr(matrix[:64, :64])[1],
        ]

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        for _ in range(5):
            for result in step():
                outcome.bytes_of(host(result))
        return outcome

    return Program(check, step, torch.cuda.synchronize)


def graphs() -> Program:
    """Capture once, replay often, with new input in the captured buffer."""
    torch.manual_seed(5)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    into = torch.zeros(32, 256, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(into)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(into)

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        source = torch.Generator().manual_seed(13)
        for _ in range(50):
            into.copy_(torch.randn(32, 256, generator=source))
            graph.replay()
            outcome.bytes_of(host(out))
        return outcome

    return Program(check, graph.replay, torch.cuda.synchronize)


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples that depend on their index alone."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        return torch.randn(1024, generator=torch.Generator().manual_seed(index))


def loader() -> Program:
    """Forked DataLoader workers while this process uses CUDA; pinned memory; copies that do not block."""

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        torch.ones(1, device="cuda")  # CUDA is in use when the workers are forked
        batches = torch.utils.data.DataLoader(
            Numbers(), batch_size=32, num_workers=2, pin_memory=True, multiprocessing_context="fork"
        )
        for batch in batches:
            outcome.bytes_of(host(torch.sort(batch.to("cuda", non_blocking=True)).values * 2))
        return outcome

    return Program(check, None, torch.cuda.synchronize)


def compiled() -> Program:
    """torch.compile: kernels by Triton."""
    function = torch.compile(lambda x, y: torch.softmax(torch.sin(x) * y + torch.tanh(y), dim=-1).sum(0))
    source = torch.Generator().manual_seed(17)
    left, right = (torch.randn(256, 1024, generator=source).cuda() for _ in range(2))

    def check() -> Outcome:
        outcome = Outcome(TOLERANCE)
        for scale in range(1, 21):
            outcome.bytes_of(host(function(left * scale, right)))
        return outcome

    return Program(check, lambda: function(left, right), torch.cuda.synchronize)


def all_reduce() -> Program:
    """NCCL over two GPUs of one process."""
    if torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")

    from torch.cuda import nccl

    tensors = [torch.full((1 << 20,), float(gpu + 1), device=f"cuda:{gpu}") for gpu in range(2)]
    results = [torch.zeros_like(tensor) for tensor in tensors]

    def synchronize() -> None:
        for gpu in range(2):
            torch.cuda.synchronize(gpu)

    def check() -> Outcome:
        outcome = Outcome()
        for _ in range(20):
            nccl.all_reduce(tensors, results)
        synchronize()
        for result in results:
            outcome.bytes_of(host(result))
        return outcome

    return Program(check, lambda: nccl.all_reduce(tensors, results), synchronize)


CASES = {
    "eager": lambda: training(autocast=False),
    "one-thread": one_thread,
    "small": small,
    "autocast": lambda: training(autocast=True),
    "libraries": libraries,
    "graphs": graphs,
    "loader": loader,
    "compile": compiled,
    "nccl": all_reduce,
}
