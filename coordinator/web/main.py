"""The process of the page: serves a listening socket that it inherits, until the coordinator ends."""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
import argparse
import logging
import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.system.web_process import WebError, read_token
from nvshare.coordinator.web.app import make_app
from nvshare.coordinator.web.reader import SocketReader

NICENESS = 5
"""The coordinator goes first."""
MAX_CONNECTIONS = 512


def _end_with_coordinator(alive: int) -> None:
    """Ends this process at once when the coordinator's end of the pipe closes.  It has nothing to save."""
    os.read(alive, 1)
    os._exit(0)


def main() -> None:
    """Entry point; started by system/web_process.py alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--alive", type=int, required=True)
    options = parser.parse_args()
    threading.Thread(target=_end_with_coordinator, args=(options.alive,), daemon=True).start()
    os.nice(NICENESS)
    logging.basicConfig(level="WARNING", format="%(asctime)s nvshare-coordinator %(levelname)s: page: %(message)s")
    try:
        token = None if options.token_file is None else read_token(options.token_file)
    except WebError as error:
        sys.exit(f"nvshare-coordinator: {error}")
    app = make_app(SocketReader(RuntimeDir(options.runtime_dir)), token)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=16_384,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=options.listener)])


if __name__ == "__main__":
    main()
