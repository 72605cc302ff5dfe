"""Pods with claims, in containers of a real containerd with runc; `nvshare-dra` is a real process."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.kubernetes.dra.claim_shapes import parameters
from tests.kubernetes.dra.cluster import SLICE
from tests.kubernetes.dra.test_claims import INTERACTIVE
from tests.kubernetes.dra.worker import Worker
from tests.kubernetes.nri.worker import FOREVER
from tests.waiting import eventually

BUSY = ("1000", "10000000", "4")
"""Seconds, duration of a kernel in ns, kernels in flight."""


def test_two_pods_share_a_card_by_their_claims(worker: Worker, saturate: Path) -> None:
    """Broken: what the scheduler promised is not held: each pod's time, its memory limit, or its name in `slots`."""
    interactive = (parameters((), **INTERACTIVE),)
    for name, percent, memory, config in (("small", "30", "2Gi", interactive), ("large", "70", "5000Mi", ())):
        cdi = worker.prepare(worker.scheduled(name, {"memory": memory, "compute": percent}, config=config))
        container = worker.contain(worker.pod(name), [str(saturate), *BUSY], "main", {}, cdi)
        where = f"{name}/gpu-0"
        eventually(lambda where=where: worker.slots()[where]["registered"], worker.containerd.output(container))  # type: ignore[misc]
    slots = worker.slots()
    assert {name: slot["limit_bytes"] for name, slot in slots.items()} == {
        "small/gpu-0": 2 << 30,
        "large/gpu-0": 5120 << 20,
    }
    assert {name: slot["share_request"] for name, slot in slots.items()} == {"small/gpu-0": 0.3, "large/gpu-0": 0.7}
    assert {tuple(slot["gpus"]) for slot in slots.values()} == {(worker.uuids()[0],)}
    assert slots["small/gpu-0"]["class"] == "interactive"
    worker.await_shares(0.3, 0.7)


TAKE = """
import ctypes, os, sys, time
cuda, context, piece = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
free, total, took, end_s = ctypes.c_size_t(), ctypes.c_size_t(), [], time.monotonic() + 60
assert cuda.cuInit(0) == 0
for device, limit in enumerate(map(int, sys.argv[1:])):
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cuda.cuCtxSetCurrent(context) == 0
    while limit and total.value != limit << 20 and time.monotonic() < end_s:
        os.sched_yield()  # a busy coordinator's answer may be late
        assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    had = 0
    while had < 64 and cuda.cuMemAlloc_v2(ctypes.byref(piece), ctypes.c_size_t(128 << 20)) == 0:
        had += 1
    took.append(had * 128)
print(*took)
"""
"""Takes all memory that it can have of GPUs, once it sees their limits (MiB; 0: not its own); prints MiB of each."""


def test_limits_hold_on_each_card(worker: Worker) -> None:
    """Broken: a container of several cards has more, or less, of one of them than its claim."""
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("containers have the machine's /usr, and there is no Python in it")
    apart = [{"requests": ["gpu-0", "gpu-1"], "distinctAttribute": "gpu.nvshare.com/uuid"}]
    for name, claim, expected in (
        ("two-cards", worker.scheduled("two-cards", {"memory": "2Gi", "compute": "30"}, count=2), "2048 2048"),
        ("requests", worker.scheduled("requests", {"memory": "1Gi"}, {"memory": "3Gi"}, constraints=apart), "0 3072"),
    ):
        command = [python, "-c", TAKE, *expected.split()]
        container = worker.contain(worker.pod(name), command, "main", {}, worker.prepare(claim))
        said = worker.containerd.finish(container)[1]
        assert expected in said.splitlines(), said


def test_a_claim_lives_over_restarts(worker: Worker) -> None:
    """Broken: a restarted driver forgets claims: slots or files stay, or a container starts without the hook."""
    claim = worker.scheduled("one", {"memory": "1Gi"})
    cdi = worker.prepare(claim)
    slots = worker.slot_files()
    worker.stop_plugin(signal.SIGKILL)
    del worker.api.objects[SLICE]  # as the kubelet does meanwhile
    worker.start_driver("--memory-boundary=on", "--processes=2")
    assert worker.prepare(claim) == cdi
    assert worker.slot_files() == slots
    command = ["/bin/sh", "-c", "echo $NVSHARE_SOCKET $NVIDIA_GPU_MEMORY_LIMIT; cat /etc/ld.so.preload"]
    made = worker.contain(worker.pod("one"), command, "main", {"NVIDIA_GPU_MEMORY_LIMIT": "99999"}, cdi)
    assert worker.containerd.finish(made) == (
        0,
        "/run/nvshare/hooks.sock 2048\n/opt/nvshare/lib/libnvshare_hook.so\n",
    )
    assert not worker.kubelet.call("NodeUnprepareResources", claim)[claim["metadata"]["uid"]].error
    assert not worker.slot_files()
    assert not list(worker.containerd.cdi_dir.iterdir())
    worker.contain(worker.pod("two"), FOREVER, "main", {}, worker.prepare(worker.scheduled("two", {"memory": "1Gi"})))
    assert worker.stop_plugin(signal.SIGTERM) == 0
    assert not worker.kubelet.registry.exists()
    assert SLICE in worker.api.objects
    assert len(worker.slot_files()) == 1


def test_an_old_cluster_ends_the_command_with_a_sentence(worker: Worker) -> None:
    """Broken: an operator sees a traceback, or a pod that runs and does nothing."""
    worker.stop_plugin(signal.SIGTERM)
    worker.api.minor = "35"
    assert worker.driver().wait(60) == 1
    last = worker.log("dra").splitlines()[-1]
    assert last.startswith("nvshare-dra: the API server is Kubernetes 1.35, and the DRA driver needs 1.36 or newer")
