"""The simulated NVML, through the real nvidia-ml-py."""

from __future__ import annotations

from tests.simulated_gpu.conftest import Run

CARDS = """
    import pynvml as n
    n.nvmlInit()
    first = n.nvmlDeviceGetHandleByIndex(0)
"""


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
