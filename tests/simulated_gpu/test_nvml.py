"""The simulated NVML, through the real nvidia-ml-py."""

from __future__ import annotations

from tests.simulated_gpu.conftest import Run

CARDS = """
    import pynvml as n
    n.nvmlInit()
    first = n.nvmlDeviceGetHandleByIndex(0)
"""


def test_cards_are_those_of_cuda(run: Run) -> None:
    """The coordinator names GPUs by NVML's UUID and the hook by CUDA's: they must be the same."""
    run(
        CARDS
        + """
    import uuid
    d = Driver(device=1)
    assert n.nvmlDeviceGetCount() == 2
    raw = (ctypes.c_ubyte * 16)()
    d.cuDeviceGetUuid_v2(raw, 1)
    name = "GPU-" + str(uuid.UUID(bytes=bytes(raw)))
    second = n.nvmlDeviceGetHandleByUUID(name)
    assert n.nvmlDeviceGetUUID(second) == name != n.nvmlDeviceGetUUID(first)
    assert (n.nvmlDeviceGetIndex(second), n.nvmlDeviceGetMinorNumber(second)) == (1, 1)
    assert n.nvmlDeviceGetName(second) == "Simulated GPU"
    assert n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetPciInfo(second).busId)) == name
    assert n.nvmlSystemGetCudaDriverVersion() == 13000
    n.nvmlShutdown()
    try:
        n.nvmlDeviceGetCount()
        raise SystemExit("NVML answered after its shutdown")
    except n.NVMLError_Uninitialized:
        pass
    """,
        NVSHARE_SIMULATE="2x1GiB",
    )


def test_memory_and_processes(run: Run) -> None:
    """Monitoring shows the memory of live clients, and no dead processes."""
    run(
        CARDS
        + """
    import subprocess, sys
    assert n.nvmlDeviceGetComputeRunningProcesses(first) == []
    d = Driver()
    d.allocate(64 << 20)
    info, newer = n.nvmlDeviceGetMemoryInfo(first), n.nvmlDeviceGetMemoryInfo(first, version=n.nvmlMemory_v2)
    assert (info.total, info.used, info.free) == (1 << 30, 64 << 20, (1 << 30) - (64 << 20))
    assert (newer.total, newer.used) == (info.total, info.used)
    code = "from sim_driver import *; d = Driver(); d.allocate(1 << 20); print(flush=True); wait_for_line()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    running = {p.pid: p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(first)}
    assert running == {os.getpid(): 64 << 20, other.pid: 1 << 20}, running
    other.kill()
    other.wait()
    assert [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(first)] == [os.getpid()]
    assert n.nvmlDeviceGetUtilizationRates(first).memory == 6
    """,
        NVSHARE_SIMULATE="1x1GiB",
    )


def test_mig_instances(run: Run) -> None:
    """A MIG instance is a scheduling domain with a UUID and a capacity of its own."""
    run(
        CARDS
        + """
    assert n.nvmlDeviceGetMigMode(first) == [1, 1]
    parts = [n.nvmlDeviceGetMigDeviceHandleByIndex(first, i) for i in range(2)]
    names = [n.nvmlDeviceGetUUID(part) for part in parts]
    assert all(name.startswith("MIG-") for name in names) and len(set(names)) == 2
    assert [n.nvmlDeviceGetMemoryInfo(part).total for part in parts] == [1 << 30] * 2
    assert n.nvmlDeviceGetMemoryInfo(first).total == 2 << 30
    os.environ["CUDA_VISIBLE_DEVICES"] = names[1]
    d = Driver()
    d.allocate(1 << 20)
    assert [n.nvmlDeviceGetMemoryInfo(part).used for part in parts] == [0, 1 << 20]
    assert [p.gpuInstanceId for p in n.nvmlDeviceGetComputeRunningProcesses(first)] == [2]
    whole = n.nvmlDeviceGetHandleByIndex(1)
    assert n.nvmlDeviceGetMigMode(whole) == [0, 0]
    """,
        NVSHARE_SIMULATE="2x2GiB",
        NVSHARE_SIM_MIG="0:2",
    )
