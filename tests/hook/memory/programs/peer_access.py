"""Access of one GPU to another one's memory, for the programs that tests start: ctypes only.

Non-goals: anything that imports the product; these programs see what an application sees.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from between_gpus import Driver, primary  # type: ignore[import-not-found]  # beside this program

u64 = ctypes.c_uint64
cuda = Driver()


def enable_peer(owner: int) -> int:
    """The current GPU may reach memory of another one."""
    return int(cuda.cuCtxEnablePeerAccess(ctypes.c_void_p(primary(owner)), 0))


def disable_peer(owner: int) -> int:
    """The end of that."""
    return int(cuda.cuCtxDisablePeerAccess(ctypes.c_void_p(primary(owner))))


COPIER = b"""
.version 7.0
.target sm_70
.address_size 64
// A simulated GPU knows this one by its name.
.visible .entry nvs_copy(.param .u64 to, .param .u64 source, .param .u64 words)
{
  .reg .u64 %r<8>; .reg .u32 %t<5>; .reg .pred %p;
  ld.param.u64 %r1, [to]; ld.param.u64 %r2, [source]; ld.param.u64 %r3, [words];
  mov.u32 %t1, %ctaid.x; mov.u32 %t2, %ntid.x; mov.u32 %t3, %tid.x; mad.lo.u32 %t4, %t1, %t2, %t3;
  cvt.u64.u32 %r4, %t4; setp.ge.u64 %p, %r4, %r3; @%p bra end;
  shl.b64 %r5, %r4, 2; add.u64 %r6, %r1, %r5; add.u64 %r7, %r2, %r5;
  ld.global.u32 %t1, [%r7]; st.global.u32 [%r6], %t1;
end:
  ret;
}
"""


def kernel_copy(to: int, source: int, size: int) -> int:
    """A kernel on the current GPU reads one address and writes another; waited for."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    result = cuda.cuModuleLoadData(ctypes.byref(module), COPIER)
    result = result or cuda.cuModuleGetFunction(ctypes.byref(function), module, b"nvs_copy")
    values = u64(to), u64(source), u64(size // 4)
    parameters = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    blocks = (size // 4 + 255) // 256
    result = result or cuda.cuLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, None, parameters, None)
    return int(result or cuda.cuCtxSynchronize())


def peer_facts(gpu: int, other: int) -> list[int]:
    """Answers of the driver about access between two GPUs: results and values."""
    value = ctypes.c_int(-1)
    facts = [int(cuda.cuDeviceCanAccessPeer(ctypes.byref(value), gpu, other)), value.value]
    for attribute in (1, 2, 3, 4, 99):
        value = ctypes.c_int(-1)
        facts += [int(cuda.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, gpu, other)), value.value]
    return facts


COMMANDS: dict[str, Callable[..., Any]] = {
    "enable_peer": enable_peer,
    "disable_peer": disable_peer,
    "kernel_copy": kernel_copy,
    "peer_facts": peer_facts,
}
