"""Print the directory of cuda.h for CMake: from the nvidia-cuda-runtime wheel, else from a CUDA toolkit."""

import importlib.util
import os
import sys
from pathlib import Path


def candidates() -> list[Path]:
    """Directories that may hold cuda.h, best first."""
    found: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        found += [*sorted(Path(root).glob("cu*/include"), reverse=True), Path(root) / "cuda_runtime" / "include"]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return [*found, Path(home) / "include"]


def main() -> int:
    """Exit code 0 and one line, or 1 and what to install."""
    for directory in candidates():
        if (directory / "cuda.h").is_file():
            print(directory)
            return 0
    print("cuda.h not found: pip install nvidia-cuda-runtime, or pass -DNVSHARE_CUDA_INCLUDE=DIR", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
