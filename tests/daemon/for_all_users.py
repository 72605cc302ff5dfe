"""As made_up_gpus.py, where the runtime directory is the system's: all users may connect."""

import sys
from pathlib import Path

from nvshare.coordinator.system import runtime_dir
from tests.daemon import made_up_gpus

if __name__ == "__main__":
    assert sys.argv[2] == "--runtime-dir"
    runtime_dir.SYSTEM_DIRECTORY = Path(sys.argv[3])  # type: ignore[misc]
    made_up_gpus.main()
