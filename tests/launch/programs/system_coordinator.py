"""nvshare-coordinator where another directory is the system's: `python system_coordinator.py DIRECTORY [options]`."""

import sys
from pathlib import Path

from nvshare.coordinator.daemon import main
from nvshare.coordinator.system import runtime_dir

if __name__ == "__main__":
    runtime_dir.SYSTEM_DIRECTORY = Path(sys.argv[1])  # type: ignore[misc]
    main.main(["--runtime-dir", *sys.argv[1:]])
