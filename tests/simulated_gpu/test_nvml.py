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


def test_every_name_is_there(run: Run) -> None:
    """Broken: a program that calls a name without a version calls a null pointer, as NCCL does."""
    run(
        CARDS
        + """
    import inspect, re
    library = ctypes.CDLL("libnvidia-ml.so.1")
    names = set(re.findall(r'_nvmlGetFunctionPointer\\("(\\w+)"', inspect.getsource(n)))
    assert len(names) > 300
    assert [name for name in sorted(names) if not hasattr(library, name)] == []
    count, device, status = c_uint(), c_void_p(), c_int(-1)
    assert library.nvmlInit() == 0
    assert library.nvmlDeviceGetCount(byref(count)) == 0 and count.value == 1
    assert library.nvmlDeviceGetHandleByIndex(0, byref(device)) == 0
    assert library.nvmlDeviceGetHandleByPciBusId(b"0000:01:00.0", byref(device)) == 0
    assert library.nvmlDeviceGetP2PStatus(device, device, 0, byref(status)) == 0 and status.value == 0
    assert library.nvmlDeviceGetTemperature(device, 0, byref(count)) == 3, "nothing is simulated"
    old = ctypes.create_string_buffer(b"\\xff" * 68)
    assert library.nvmlDeviceGetPciInfo_v2(device, old) == 0
    assert old.raw[36:68] == b"\\xff" * 32, "the old record is shorter"
    for _ in range(2):
        library.nvmlShutdown()
    assert library.nvmlDeviceGetTemperature(device, 0, byref(count)) == 1
    """
    )
