"""`nvshare-ctl install cdi`: a CDI specification by which containers without Kubernetes share the GPUs.

The kind is `nvshare.com/gpu`; devices are named by index, by UUID, and `all`.  Each device has the hook and the
coordinator's runtime directory, so a container has them once, whichever devices it asks for.  Driver and device nodes
come from NVIDIA's own devices (`nvidia.com/gpu`), which decide what a container sees.  Simulated GPUs have neither:
their devices bring the simulated driver, and a single one shows the container no other.

As in Kubernetes, `/etc/ld.so.preload` names the hook, and the runtime directory is at /run/nvshare.  The directory is
mounted, not the sockets in it, since a restarted coordinator makes new sockets.

Non-goals: options of programs.  A variable of the specification would win over the container's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nvshare.client_hook.launcher import LaunchError, find_hook
from nvshare.coordinator.cli.ctl_call import Where, call, directory_of, fail
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu import LibraryNotFoundError, library_directory

KIND: Final = "nvshare.com/gpu"
SPECIFICATION: Final = Path("/etc/cdi/nvshare.json")
VERSION: Final = "0.5.0"
"""The oldest version of CDI that allows device names which begin with a digit."""
SIMULATED_DRIVER: Final = "/opt/nvshare-simulated"
_ACCESS: Final = ("nosuid", "nodev", "rbind", "rprivate")


def specification(status: dict[str, Any], version: Path) -> dict[str, Any]:
    """The specification for a coordinator's `status`; `version` is the directory of an installed hook.

    Raises LibraryNotFoundError when the GPUs are simulated and their driver is not installed.
    """
    from nvshare.coordinator.kubernetes.node.allocation import SLOT_IN_CONTAINER, hook_mounts  # slow

    directory = RuntimeDir(Path(status["runtime_dir"]))
    mounts = [_mount(each.host_path, each.container_path) for each in hook_mounts(directory.path, version)]
    environment = [f"NVSHARE_SOCKET={SLOT_IN_CONTAINER}/{directory.hooks_socket.name}"]
    if status["simulated"]:
        state = f"{SLOT_IN_CONTAINER}/{directory.simulated_gpu.name}"
        mounts.append(_mount(library_directory(), SIMULATED_DRIVER))
        mounts.append(_mount(directory.simulated_gpu, state, "rw"))
        environment += [f"LD_LIBRARY_PATH={SIMULATED_DRIVER}", f"NVSHARE_SIM_STATE={state}"]
    devices = [{"name": "all", "containerEdits": {"env": environment}}]
    for gpu in status["gpus"]:
        one = [*environment, f"CUDA_VISIBLE_DEVICES={gpu['uuid']}"] if status["simulated"] else environment
        devices += [{"name": name, "containerEdits": {"env": one}} for name in (str(gpu["index"]), gpu["uuid"])]
    return {"cdiVersion": VERSION, "kind": KIND, "devices": devices, "containerEdits": {"mounts": mounts}}


def _mount(host: Path, container: str, access: str = "ro") -> dict[str, Any]:
    return {"hostPath": str(host), "containerPath": container, "options": [access, *_ACCESS]}


def default_library_dir() -> Path:
    """Root's is that of the device plugin; other users have one below their home."""
    if os.geteuid() == 0:
        return Path("/var/lib/nvshare/lib")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "nvshare" / "lib"


def install_cdi(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE|-", help="where to write it; - prints it")
    ] = SPECIFICATION,
    library_dir: Annotated[
        Path | None, typer.Option(help="the hook is copied here; one subdirectory a version (/var/lib/nvshare/lib)")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="remove the file; the hook's copies stay")] = False,
    where: Where = None,
) -> None:
    """Let containers of Docker, Podman and containerd share the GPUs: write a CDI specification."""
    from nvshare.coordinator.kubernetes.node import library  # slow
    from nvshare.coordinator.kubernetes.slots.slot import replace_file

    try:
        if remove:
            output.unlink(missing_ok=True)
            typer.echo(f"{output} is removed; running containers keep the hook")
            return
        status = call(directory_of(context, where), api.Status())
        folder = (library_dir or default_library_dir()).absolute()
        made = specification(status, folder / library.install(find_hook(os.environ), folder, None))
        text = json.dumps(made, indent=2) + "\n"
        if str(output) == "-":
            typer.echo(text, nl=False)
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
            replace_file(output, text.encode())  # container engines may read it at any moment
            names = ", ".join(f"{KIND}={device['name']}" for device in made["devices"])
            typer.echo(f"{output} is written: {names}")
    except (ControlError, NoCoordinatorError) as error:
        fail(error, as_json=False)
    except (LaunchError, library.InstallError, LibraryNotFoundError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename or output}: {error.strerror}; run this as root, or choose another --output")
    if status["embedded"]:
        typer.echo(
            f"nvshare-ctl: the coordinator in {status['runtime_dir']} ends with the programs that started it; "
            "containers need one that stays: see `nvshare-ctl install unit`",
            err=True,
        )


def _refuse(text: str) -> None:
    sys.stderr.write(f"nvshare-ctl: {text}\n")
    raise typer.Exit(1)
