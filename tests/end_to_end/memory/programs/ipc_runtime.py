"""An unmodified program of two processes that share memory by the runtime's cudaIpc functions: both write, both read.

Arguments: the path of a libcudart, and how many KiB.  Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

LAZY = 1
TO_DEVICE, TO_HOST = 1, 2


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("content", ctypes.c_ubyte * 64)]


class Cudart:
    """The runtime's functions, over ctypes."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name}: {result}")

    def malloc(self, size: int) -> int:
        """cudaMalloc"""
        out = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(out), ctypes.c_size_t(size))
        return int(out.value or 0)

    def free(self, pointer: int) -> None:
        """cudaFree"""
        self._call("cudaFree", ctypes.c_void_p(pointer))

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        """cudaMemcpy"""
        self._call("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size), kind)

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        """cudaIpcGetMemHandle"""
        handle = Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(handle)

    def ipcOpenMemHandle(self, content: bytes) -> int:
        """cudaIpcOpenMemHandle"""
        out = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(out), Handle.from_buffer_copy(content), LAZY)
        return int(out.value or 0)

    def ipcCloseMemHandle(self, pointer: int) -> None:
        """cudaIpcCloseMemHandle"""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))


def pattern(seed: int, size: int) -> bytes:
    """`size` bytes that depend on the seed."""
    block = hashlib.shake_128(bytes([seed])).digest(4099)
    return (block * (size // len(block) + 1))[:size]


def put(cuda: Cudart, pointer: int, size: int, seed: int) -> None:
    """Writes a pattern."""
    content = ctypes.create_string_buffer(pattern(seed, size), size)
    cuda.memcpy(pointer, ctypes.addressof(content), size, TO_DEVICE)


def holds(cuda: Cudart, pointer: int, size: int, seed: int) -> bool:
    """Is the pattern there?"""
    content = ctypes.create_string_buffer(size)
    cuda.memcpy(ctypes.addressof(content), pointer, size, TO_HOST)
    return content.raw == pattern(seed, size)


def child(path: str, link: Connection) -> None:
    """Opens, checks, writes, closes; for each handle that it hears of."""
    cuda = Cudart(path)
    while (told := link.recv()) is not None:
        content, size, seed = told
        pointer = cuda.ipcOpenMemHandle(content)
        right = holds(cuda, pointer, size, seed)
        put(cuda, pointer, size, seed + 1)
        cuda.ipcCloseMemHandle(pointer)
        link.send(right)


def main() -> int:
    """See the head of the file."""
    path, size = sys.argv[1], int(sys.argv[2]) << 10
    cuda = Cudart(path)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(path, there), daemon=True)
    process.start()
    rounds = wrong = 0
    for seed in range(0, 20, 2):
        pointer = cuda.malloc(size)
        put(cuda, pointer, size, seed)
        here.send((cuda.ipcGetMemHandle(pointer), size, seed))
        wrong += not here.recv()
        wrong += not holds(cuda, pointer, size, seed + 1)
        cuda.free(pointer)
        rounds += 1
    here.send(None)
    process.join()
    print(json.dumps({"rounds": rounds, "wrong": wrong, "child": process.exitcode}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
