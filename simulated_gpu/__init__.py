"""The simulated GPU: doubles of the CUDA driver and of NVML, and how to use them from Python.

`library_directory()` says where the two libraries are.  Nothing else may go here: this is imported by every tool.
"""

import os
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


class LibraryNotFoundError(RuntimeError):
    """The doubles are not built or not installed."""


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
    if named:  # it and no other: whoever names one does not want the results of another
        yield Path(named)
        return
    yield Path(__file__).parent / "lib"
    from importlib import metadata  # slow to import, and nvshare-run runs before every command

    try:
        files = metadata.distribution("nvshare").files or []
        yield from (Path(str(file.locate())).parent for file in files if file.name == LIBRARIES[0])
    except metadata.PackageNotFoundError:
        pass  # running from a source tree
