"""`nvshare-run --gpu`: asks the coordinator for GPUs, and names them to CUDA before the program starts.

The reservation belongs to this process, which becomes the program by exec.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import ControlCaller, NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.units import parse_size
from nvshare.scheduler_policies.api import JobClass

_RETRY_S: Final = 1.0


def with_gpus(environ: Mapping[str, str], options: argparse.Namespace, command: Sequence[str]) -> dict[str, str]:
    """`environ` of a client, with the chosen GPUs.  Raises LaunchError."""
    try:
        request = _request(environ, options, command)
    except ValueError as error:
        raise LaunchError(f"--gpu: {api.problem(error)}") from None
    result = _ask(RuntimeDir(Path(environ["NVSHARE_RUNTIME_DIR"])), request, wait=options.wait)
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(result["uuids"]), "NVSHARE_PLACEMENT": result["placement"]}


def _request(environ: Mapping[str, str], options: argparse.Namespace, command: Sequence[str]) -> api.Place:
    automatic = re.fullmatch("auto(?::([0-9]+))?", options.gpu or "auto")
    job_class = environ.get("NVSHARE_CLASS", "").replace("-", "_").upper()
    return api.Place(
        count=int(automatic[1] or 1) if automatic else 1,
        gpus="" if automatic else options.gpu,
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        fastest_first=environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID",
        memory_bytes=parse_size(environ.get("NVSHARE_MEMORY_LIMIT") or "0"),
        job_class=JobClass[job_class] if job_class in JobClass.__members__ else 0,
        name=_name(environ.get("NVSHARE_NAME"), command),
        beside=options.beside or "",
        apart=options.apart or "",
        alone=options.alone,
        within=environ.get("NVSHARE_PLACEMENT", "")[:255],
    )


def _name(given: str | None, command: Sequence[str]) -> str:
    """The name that the program will have: as given, else its script's, as far as its command line tells."""
    words = (Path(word).name for word in command if not word.startswith("-"))
    name = given or next((word for word in words if not re.match("python|pypy", word)), Path(command[0]).name)
    return "".join(c if c.isprintable() else "?" for c in os.fsencode(name)[:63].decode("utf-8", "ignore")) or "?"


def _ask(directory: RuntimeDir, request: api.Place, *, wait: bool) -> dict[str, Any]:
    """The coordinator's choice.  Raises LaunchError."""
    if not os.access(directory.control_socket, os.W_OK):
        text = f"--gpu needs {directory.control_socket}, which this user or container may not use"
        raise LaunchError(f"{text}; leave it out, or set CUDA_VISIBLE_DEVICES")
    caller, waits = ControlCaller(directory.control_socket), False
    try:
        while True:
            try:
                result: dict[str, Any] = api.decode_reply(caller.call(api.encode_request(request)))
            except ControlError as error:
                if not wait or error.code not in ("no_place", "busy"):
                    raise LaunchError(error.text) from None
                if not waits:
                    sys.stderr.write(f"nvshare-run: waiting: {error.text}\n")
                waits = True
                time.sleep(_RETRY_S)
            else:
                return result
    except NoCoordinatorError as error:
        raise LaunchError(str(error)) from None
    finally:
        caller.close()
