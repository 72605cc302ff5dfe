"""Memory through the real libcudart (its path is the argument), as most programs reach it; one line of JSON out."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

rt = ctypes.CDLL(sys.argv[1])
size_t = ctypes.c_size_t


class Attributes(ctypes.Structure):
    """cudaPointerAttributes, and room for more."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("rest", ctypes.c_uint64 * 8),
    ]


def call(name: str, *arguments: Any) -> None:
    """Ends the program when CUDA refuses."""
    result = getattr(rt, name)(*arguments)
    if result != 0:
        sys.exit(f"{name}: {result}")


def made(name: str, *arguments: Any) -> ctypes.c_void_p:
    """A pointer or handle."""
    out = ctypes.c_void_p()
    call(name, ctypes.byref(out), *arguments)
    return out


def free_bytes() -> int:
    """Free memory as the program sees it."""
    free, total = size_t(), size_t()
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def kind(pointer: ctypes.c_void_p) -> list[Any]:
    """[cudaMemoryType, has a host pointer, device pointer is the pointer]"""
    of = Attributes()
    call("cudaPointerGetAttributes", ctypes.byref(of), pointer)
    return [of.type, bool(of.host_pointer), of.device_pointer == pointer.value]


def main() -> None:
    """Allocates in every way, frees all of it."""
    out: dict[str, Any] = {"at_first": free_bytes()}
    plain = made("cudaMalloc", size_t(3 << 20))
    managed = made("cudaMallocManaged", size_t(1 << 20), 1)
    stream = made("cudaStreamCreate")
    row = size_t()
    pitched = made("cudaMallocPitch", ctypes.byref(row), size_t(1000), size_t(10))
    out |= {"plain": kind(plain), "managed": kind(managed), "pitch": row.value, "with_all": free_bytes()}
    ordered = made("cudaMallocAsync", size_t(1 << 20), stream)
    out |= {"ordered": kind(ordered), "with_ordered": free_bytes()}
    call("cudaFreeAsync", ordered, stream)
    call("cudaStreamSynchronize", stream)
    for pointer in (plain, managed, pitched):
        call("cudaFree", pointer)
    out["at_last"] = free_bytes()
    too_much = ctypes.c_void_p()
    out["refused"] = rt.cudaMalloc(ctypes.byref(too_much), size_t(1 << 34))
    call("cudaDeviceReset")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
