"""The simulated GPU: a CUDA driver and an NVML without hardware.

Every tool imports this module, so it only locates the two libraries.
"""

import os
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


class LibraryNotFoundError(RuntimeError):
    """The simulated libraries are not built or not installed."""


def library_directory() -> Path:
    """The directory that holds both libraries; raises LibraryNotFoundError with the remedy."""
    looked_at = []
    for candidate in _candidates():
        if all((candidate / name).is_file() for name in LIBRARIES):
            return candidate.resolve()
        looked_at.append(candidate)
    looked = ", ".join(str(candidate) for candidate in looked_at)
    raise LibraryNotFoundError(
        f"the simulated GPU's libraries ({' and '.join(LIBRARIES)}) are in none of: {looked}. "
        "Install the package (pip install .), or build it with CMake and set NVSHARE_SIM_LIBRARY_DIR to its "
        "simulated_gpu/lib directory."
    )


def _candidates() -> Iterator[Path]:
    named = os.environ.get("NVSHARE_SIM_LIBRARY_DIR")
    if named:  # the only candidate: a fallback would test other libraries
        yield Path(named)
        return
    yield Path(__file__).parent / "lib"
    from importlib import metadata  # slow to import, and nvshare-run runs before every command

    try:
        files = metadata.distribution("nvshare").files or []
        yield from (Path(str(file.locate())).parent for file in files if file.name == LIBRARIES[0])
    except metadata.PackageNotFoundError:
        pass  # running from a source tree
