"""nvshare-coordinator where another directory is the system's: `python system_coordinator.py DIRECTORY [options]`."""

import sys
from pathlib import Path

from coordinator import daemon, runtime_dir

if __name__ == "__main__":
    runtime_dir.SYSTEM_DIRECTORY = Path(sys.argv[1])  # type: ignore[misc]
    daemon.main(["--runtime-dir", *sys.argv[1:]])
