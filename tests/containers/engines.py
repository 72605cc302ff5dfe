"""Containers of crun and podman: a file system of their own with the machine's /usr in it, and no network.

Both run in a mount namespace of the test's own.  There podman finds the test's CDI specification in /etc/cdi, and the
cgroup mount that crun refuses (a hybrid of both versions) is absent.  crun knows nothing of CDI: `Crun` does what an
engine does with a specification.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.processes import TURNS, environment, serving
from tests.waiting import BOUND_S

_NAMESPACE: Final = """
umount /sys/fs/cgroup/unified 2>/dev/null
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/etc.work" /etc && echo made && exec cat
"""
_LAUNCHER: Final = Path(__file__).parents[1] / "launch" / "programs" / "system_coordinator.py"
OUTER_USER: Final = 100_000
"""What root of a container with users of its own is outside."""


class Engine:
    """Starts and kills containers.  `base` is empty, and all users may enter it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.specification = base / "etc" / "cdi" / "nvshare.json"
        self.specification.parent.mkdir(parents=True)
        (base / "etc.work").mkdir()
        self._started: dict[str, subprocess.Popen[str]] = {}
        words = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _NAMESPACE, "sh", str(base)]
        self._namespace = subprocess.Popen(words, stdin=-1, stdout=-1, stderr=-1, text=True)
        assert self._namespace.stdout is not None
        if self._namespace.stdout.readline() != "made\n":
            pytest.skip(f"no mount namespace with an overlay: {self._namespace.communicate()[1]}")
        self.prepare()

    def prepare(self) -> None:
        """Files that the engine itself needs."""

    def command(
        self, name: str, rootfs: Path, device: str, environment: Mapping[str, str], words: Sequence[str]
    ) -> list[str]:
        """The engine's command that runs a container until it ends."""
        raise NotImplementedError

    def killing(self, name: str) -> list[str]:
        """The engine's command that kills it."""
        raise NotImplementedError

    def start(
        self, name: str, program: Path, *words: str, device: str = "", user: int = 0, **environment: str
    ) -> subprocess.Popen[str]:
        """A container that runs a program, with a device by its CDI name.  `user`: root's id outside."""
        rootfs = self.base / f"rootfs-{name}"
        for folder in ("usr", "proc", "sys", "dev", "etc", "tmp", "run", "opt"):
            (rootfs / folder).mkdir(parents=True)
        for link in ("bin", "lib", "lib64"):
            (rootfs / link).symlink_to(f"usr/{link}")
        shutil.copy(program, rootfs / "program")
        for path in (rootfs, *rootfs.iterdir()):
            shutil.chown(path, user, user) if not path.is_symlink() else None
        command = self.command(name, rootfs, device, environment, ["/program", *words])
        self._started[name] = subprocess.Popen(self._inside(command), stdout=-1, stderr=-1, text=True)
        return self._started[name]

    def kill(self, name: str) -> None:
        """Kills a container by the engine."""
        subprocess.run(self._inside(self.killing(name)), check=True, capture_output=True)

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self._namespace.pid), "-m", "--", *command]

    def close(self) -> None:
        """Ends all containers."""
        for name, process in self._started.items():
            if process.poll() is None:
                subprocess.run(self._inside(self.killing(name)), check=False, capture_output=True)
            process.communicate()
        self._namespace.communicate("")


class Podman(Engine):
    """Reads the specification itself."""

    def prepare(self) -> None:
        self._configuration = self.base / "containers.conf"
        self._configuration.write_text(
            f'[engine]\nlock_type = "file"\nevents_logger = "none"\ncgroup_manager = "cgroupfs"\n'
            f'tmp_dir = "{self.base}/tmp"\nruntime = "crun"\n'
        )

    def _podman(self, *words: str) -> list[str]:
        folders = ["--root", f"{self.base}/storage", "--runroot", f"{self.base}/run", "--storage-driver", "vfs"]
        return ["env", f"CONTAINERS_CONF={self._configuration}", "podman", *folders, *words]

    def command(
        self, name: str, rootfs: Path, device: str, environment: Mapping[str, str], words: Sequence[str]
    ) -> list[str]:
        options = ["--rm", "--name", name, "--network=none", "--cgroups=disabled", "-v", "/usr:/usr:ro"]
        for limit, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
            allowed = resource.getrlimit(number)[0]
            most = 1024 if allowed == resource.RLIM_INFINITY else min(1024, allowed)  # podman's own may be forbidden
            options += [f"--ulimit={limit}={most}:{most}"]
        options += [f"--env={variable}={value}" for variable, value in environment.items()]
        options += ["--device", device] if device else []
        return self._podman("run", *options, "--rootfs", str(rootfs), *words)

    def killing(self, name: str) -> list[str]:
        return self._podman("kill", name)


class Crun(Engine):
    """Gets what an engine makes of the specification."""

    def _crun(self, *words: str) -> list[str]:
        return ["crun", "--root", f"{self.base}/crun", "--cgroup-manager=disabled", *words]

    def command(
        self, name: str, rootfs: Path, device: str, environment: Mapping[str, str], words: Sequence[str]
    ) -> list[str]:
        edits = edits_for(json.loads(self.specification.read_text()), device) if device else []
        bundle = self.base / f"bundle-{name}"
        bundle.mkdir()
        users = rootfs.stat().st_uid
        mapping = [{"containerID": 0, "hostID": users, "size": 1000}]
        kinds = ["pid", "mount", "ipc", "uts", "network", *(["user"] if users else [])]
        options = {"proc": ("proc", []), "dev": ("tmpfs", ["mode=755"])}
        mounts: list[dict[str, Any]] = [
            {"destination": f"/{place}", "type": kind, "source": kind, "options": more}
            for place, (kind, more) in options.items()
        ]
        mounts.append({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]})
        mounts += [
            {"destination": each["containerPath"], "source": each["hostPath"], "options": each["options"]}
            for edit in edits
            for each in edit.get("mounts", [])
        ]
        variables = [f"{variable}={value}" for variable, value in environment.items()]
        variables += [variable for edit in edits for variable in edit.get("env", [])]
        linux: dict[str, Any] = {"namespaces": [{"type": kind} for kind in kinds]}
        if users:
            linux |= {"uidMappings": mapping, "gidMappings": mapping}
        config = {
            "ociVersion": "1.0.0",
            "process": {"user": {"uid": 0, "gid": 0}, "args": list(words), "env": variables, "cwd": "/"},
            "root": {"path": str(rootfs)},
            "mounts": mounts,
            "linux": linux,
        }
        (bundle / "config.json").write_text(json.dumps(config))
        return self._crun("run", "--bundle", str(bundle), name)

    def killing(self, name: str) -> list[str]:
        return self._crun("kill", name, "KILL")


def edits_for(specification: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """The edits of a container with this device: the specification's own, then the device's."""
    kind, _, name = device.partition("=")
    assert specification["kind"] == kind
    (found,) = (each for each in specification["devices"] if each["name"] == name)
    return [specification.get("containerEdits", {}), found["containerEdits"]]


@contextlib.contextmanager
def simulated_coordinator(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A machine's coordinator of two simulated GPUs, for all users, with exclusive turns of 100 ms."""
    command = [sys.executable, str(_LAUNCHER), str(directory), "--simulate=2x8GiB"]
    built = {name: os.environ[name] for name in ("NVSHARE_SIM_LIBRARY_DIR", "NVSHARE_HOOK_LIBRARY")}  # this checkout's
    process = serving(command, environment(**TURNS, **built), directory.with_suffix(".log"))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(BOUND_S)
