"""Every function that the hook wraps fails, in a program that holds the lease: it hears the driver's error, and nothing
of the hook's is left behind: it still computes, gives the lease back when asked, and is charged with nothing.

Non-goals: faults in the middle of what a wrapper does in several steps (test_memory_process.py).
"""

from __future__ import annotations

import json
import sys

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator
from tests.test_cuda_api import ROWS

PROGRAM = r"""
import ctypes, json, re, sys

names = json.loads(sys.argv[1])
cuda = ctypes.CDLL("libcuda.so.1")
nothing = [ctypes.c_size_t(0)] * 14
free, total, pointer, context = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_void_p()
print("ready", flush=True)
sys.stdin.readline()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
before = free.value
heard = {}
for name in names:
    for code in (719, 2):
        for symbol in {name, re.sub("_pts?[zs]$|_ptds$", "", name)}:
            cuda.nvs_sim_fail(symbol.encode(), ctypes.c_uint64(0), code)
        said = cuda[name](*nothing)
        cuda.nvs_sim_clear_faults()
        if said != code:
            heard[name] = said
cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
work = [cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4096)),
        cuda.cuMemsetD8_v2(pointer, 1, ctypes.c_size_t(4096)), cuda.cuCtxSynchronize(), cuda.cuMemFree_v2(pointer)]
print(json.dumps([heard, free.value - before, work]), flush=True)
sys.stdin.readline()
"""

NOT_ASKED = r"cuGetProcAddress"
"""Functions that answer without having to be able to fail."""

WRAPPED = [
    row.name
    for row in ROWS
    if row.kind in ("STREAM", "CURRENT", "UNSTREAMED", "CUSTOM")
    and row.guard == 0
    and not row.name.startswith(NOT_ASKED)
]


@pytest.mark.parametrize("mode", ["device", "managed", "swap"])
def test_every_error_is_heard_and_leaves_nothing(
    coordinator: ScriptedCoordinator, hook_env: dict[str, str], mode: str
) -> None:
    """A program would hear another error, or a failing call leave a gate shut, a capture open, bytes charged."""
    command = [sys.executable, "-S", "-c", PROGRAM, json.dumps(WRAPPED)]
    with ScriptedClient(command, {**hook_env, "NVSHARE_MEMORY": mode}) as client:
        client.tell("go")
        coordinator.welcome()
        coordinator.grant(1)
        heard, lost, work = json.loads(client.answer())
        assert len(WRAPPED) > 250
        assert heard == {}
        assert lost == 0
        assert work == [0, 0, 0, 0]
        assert coordinator.revoke(1).reason == messages.ReleaseReason.REVOKED
