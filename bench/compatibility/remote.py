"""Runs one case as a remote program: `python -m nvshare.bench.compatibility.remote FRAMEWORK.NAME`.

Under the hook, Lupine's server has the hook, and its client, which is the case, has Lupine's libcuda.so.1 instead.
Both are on this machine.  `lupine_driver_server` is on PATH; `NVSHARE_LUPINE_DIR` names the folder of the client's
library, by default that of Lupine's images.

Non-goals: networks.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from nvshare.client_hook.launcher import without_hook

SERVER = "lupine_driver_server"


def missing() -> str:
    """The part of Lupine that is not here; empty if it is all here."""
    if shutil.which(SERVER) is None:
        return f"no {SERVER} on PATH"
    library = Path(client_folder(), "libcuda.so.1")
    return "" if library.exists() else f"no {library}: NVSHARE_LUPINE_DIR names the folder of Lupine's client library"


def client_folder() -> str:
    """The folder of the client's library."""
    return os.environ.get("NVSHARE_LUPINE_DIR", "/opt/lupine/lib")


def main() -> int:
    """Command line.  The exit code is the case's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    # The GPUs of this machine are the client's own for Lupine: without the second variable the case would use them.
    client = without_hook(os.environ) | {"LUPINE_SERVER": f"127.0.0.1:{port}", "LUPINE_DISABLE_LOCAL": "1"}
    client.pop("NVSHARE_ENABLE", None)
    client["LD_LIBRARY_PATH"] = f"{client_folder()}:{client.get('LD_LIBRARY_PATH', '')}"
    server = subprocess.Popen([SERVER], env=os.environ | {"LUPINE_PORT": port}, stdin=subprocess.DEVNULL, stdout=2)
    try:
        command = [sys.executable, "-m", "nvshare.bench.compatibility.cases", *sys.argv[1:]]
        return subprocess.run(command, env=client, check=False).returncode
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
