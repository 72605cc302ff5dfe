"""Descriptors of the hook's stay out of the application's way.

Non-goals: what is sent through them.
"""

from __future__ import annotations

import json
import sys

from tests.hook.faults.test_fault_sweep import sweep
from tests.hook.scripted import ScriptedCoordinator

PROGRAM = """
import ctypes, json, os
said = os.dup2(1, 100)
os.closerange(0, 3)
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(1), ctypes.c_uint64(0), ctypes.c_size_t(0))  # gated
here, found = "/proc/self/fd/", {}
for number in os.listdir(here):
    if os.path.islink(here + number):
        found[number] = os.readlink(here + number)
os.write(said, json.dumps(found).encode())
"""


def test_a_program_without_standard_output(coordinator: ScriptedCoordinator, hook_env: dict[str, str]) -> None:
    """A daemon that was started with 0, 1 and 2 closed would print into the connection to the coordinator."""
    (line,) = sweep(coordinator, hook_env, sys.executable, "-S", "-c", PROGRAM)
    ours = {int(number) for number, name in json.loads(line).items() if name.startswith(("socket:", "anon_inode:"))}
    assert len(ours) >= 2
    assert min(ours) > 100
