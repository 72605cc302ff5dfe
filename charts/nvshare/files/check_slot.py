"""What `helm test` runs in a pod with a slot: the hook is loaded, its coordinator answers, and CUDA finds the GPU."""

import ctypes
import os
import socket
import sys
from pathlib import Path


def fail(text: str) -> None:
    sys.exit(f"FAILED: {text}")


if "libnvshare_hook.so" not in Path("/proc/self/maps").read_text():
    fail("the hook is not loaded: /etc/ld.so.preload must name it, and the loader's lines above say what went wrong")
path = os.environ.get("NVSHARE_SOCKET", "")
try:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
except OSError as error:
    fail(f"no coordinator answers at {path!r}: {error}")
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    fail(f"no driver in the pod ({error}): set runtimeClassName, or make NVIDIA's runtime the default")
code = cuda.cuInit(0)
if code != 0:
    fail(f"cuInit returns {code}")
count = ctypes.c_int()
cuda.cuDeviceGetCount(ctypes.byref(count))
if count.value < 1:
    fail(f"CUDA finds no GPU: NVIDIA_VISIBLE_DEVICES is {os.environ.get('NVIDIA_VISIBLE_DEVICES')!r}")
print(f"OK: {count.value} GPU, hook loaded, coordinator answers")
