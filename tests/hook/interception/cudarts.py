"""NVIDIA's runtime library in several versions, for the tests that run them over the simulated GPU.

`python -m tests.hook.interception.cudarts` installs them below build/cudarts (NVSHARE_TEST_CUDARTS names another
folder), about 20 MB; the tests skip what is not there.

Non-goals: the version that the hook is built with (client_hook/find_cuda_header.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

WHEELS = {
    "11.8": "nvidia-cuda-runtime-cu11==11.8.89",
    "12.1": "nvidia-cuda-runtime-cu12==12.1.105",
    "12.4": "nvidia-cuda-runtime-cu12==12.4.127",
    "12.8": "nvidia-cuda-runtime-cu12==12.8.90",
    "12.9": "nvidia-cuda-runtime-cu12==12.9.79",
    "13.0": "nvidia-cuda-runtime==13.0.96",
    "13.5": "nvidia-cuda-runtime==13.5.37",
}
"""From the oldest that frameworks of today ship to the newest; from 12.9 on the wheels hold the static library too."""

STATIC = ("12.9", "13.0", "13.5")


def folder() -> Path:
    """Folder of the libraries, with one folder a version."""
    return Path(os.environ.get("NVSHARE_TEST_CUDARTS") or ROOT / "build" / "cudarts")


def shared_library(version: str) -> Path | None:
    """libcudart.so of this version, if it is installed."""
    return next(iter(sorted((folder() / version).glob("nvidia/*/lib/libcudart.so.*"))), None)


def static_library(version: str) -> Path | None:
    """libcudart_static.a of this version, if it is installed."""
    return next(iter((folder() / version).glob("nvidia/*/lib/libcudart_static.a")), None)


def install() -> int:
    """Those that are missing; how many could not be had."""
    failed = 0
    for version, wheel in WHEELS.items():
        if shared_library(version) is None:
            quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder() / version))
            done = subprocess.run([sys.executable, "-m", "pip", "install", *quiet, wheel], check=False)
            failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(install() != 0)
