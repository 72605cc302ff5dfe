"""Runs a pod's specification as processes, in the order that a kubelet would, on simulated GPUs.

A container's mount paths become directories of this test, in its command, arguments and environment alike; images are
not pulled: a command of ours is this checkout's, anything else is run as it stands.  The NVIDIA runtime's part, the
driver's libraries, is the simulated driver in LD_LIBRARY_PATH.  Started by root, containers run as the user that they
name and without capabilities, so that volumes, which are root's, are as they would be in a cluster.

Non-goals: what the processes should do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.chart.conftest import SCRIPTS
from tests.conftest import ROOT, Built
from tests.waiting import eventually


@functools.cache
def _as_user(user: int) -> tuple[str, ...]:
    """In front of a command, has it run as that user, who may read this checkout but own nothing of root's.

    Empty where this process is not root, or the system lacks setpriv.
    """
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        return ()
    words = (setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--bounding-set=-all,+dac_read_search",
             "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")  # fmt: skip
    probe = [*words, sys.executable, "-c", "import os; assert os.geteuid() != 0"]
    return words if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else ()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below those that the system gives out; others for each of xdist's workers."""
    found: list[int] = []
    for port in range(10_000 + os.getpid() * 37 % 20_000, 32_000):
        with socket.socket() as probing:
            try:
                probing.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            break
    return found


@contextlib.contextmanager
def running(spec: dict[str, Any], built: Built, maps: dict[str, dict[str, str]] | None = None) -> Iterator[Pod]:
    """A pod of this specification, started, in a directory of its own."""
    pod = Pod(spec, Path(tempfile.mkdtemp(prefix="nvs-")), built, config_maps=maps or {})
    try:
        pod.start()
        yield pod
    finally:
        pod.stop()
        shutil.rmtree(pod.directory, ignore_errors=True)


@dataclass
class Pod:
    """One pod on this machine.  `directory` must be short: sockets lie in it."""

    spec: dict[str, Any]
    directory: Path
    built: Built
    gpus: str = "1x4GiB"
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    """And secrets, by their names."""
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    sidecars: list[str] = field(default_factory=list)
    places: dict[str, Path] = field(default_factory=dict)
    state: Path = Path()

    def start(
        self, state: Path | None = None, places: Path | None = None, host_paths: dict[str, str] | None = None
    ) -> None:
        """Init containers in their order, sidecars as soon as they are ready, then the containers.

        `state`: of the simulated GPUs, when they are another pod's too.  `host_paths`: which directory of `places` is
        which path of the host.
        """
        self.directory.chmod(0o755)
        self.state = state or self.directory / "gpu" / "state"
        self.state.parent.mkdir(exist_ok=True)
        self.state.parent.chmod(0o777)
        for volume in self.spec["volumes"]:
            self.places[volume["name"]] = self._make(volume, places or self.directory, host_paths or {})
        for container in self.spec["initContainers"]:
            if container.get("restartPolicy") == "Always":
                self.running[container["name"]] = self._start(container)
                self.sidecars.insert(0, container["name"])
                eventually(functools.partial(self._ready, container), f"start-up of {container['name']}")
            else:
                done = self._start(container)
                assert done.wait() == 0, self.log(container)
        for container in self.spec["containers"]:
            self.running[container["name"]] = self._start(container)

    def _make(self, volume: dict[str, Any], places: Path, host_paths: dict[str, str]) -> Path:
        """A volume's directory.  Those of the host are other pods' too, as far as `host_paths` knows them."""
        path = Path(str(volume["hostPath"]["path"])) if "hostPath" in volume else None
        for known, name in host_paths.items():
            if path is not None and path.is_relative_to(known):
                return places / name / path.relative_to(known)
        place = self.directory / str(volume["name"])
        place.mkdir()
        place.chmod(0o777 if "emptyDir" in volume else 0o755)
        source = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        for name, text in self.config_maps.get(source, {}).items():
            (place / name).write_text(text, encoding="utf-8")
        return place

    def execute(self, name: str, words: list[str]) -> str:
        """`kubectl exec`: runs a command in a container; its output."""
        (container,) = [c for c in (*self.spec["initContainers"], *self.spec["containers"]) if c["name"] == name]
        done = subprocess.run(
            self._words(container, words), env=self._environment(container), cwd=self.directory,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def status(self, name: str) -> Any:
        """The status of the coordinator in a container, without the cost of `nvshare-ctl`'s process."""
        (container,) = [c for c in (*self.spec["initContainers"], *self.spec["containers"]) if c["name"] == name]
        return call(RuntimeDir(Path(self._mapped(container, "/run/nvshare"))), api.Status())

    def restart(self, name: str) -> None:
        """Restarts a dead sidecar as the kubelet does: the volumes stay."""
        self.running[name].kill()
        self.running[name].wait()
        (container,) = [c for c in self.spec["initContainers"] if c["name"] == name]
        self.running[name] = self._start(container)
        eventually(functools.partial(self._ready, container), f"start-up of {name}")

    def stop(self) -> dict[str, int]:
        """SIGTERM to the containers, then to the sidecars; exit codes."""
        codes = {}
        order = [name for name in self.running if name not in self.sidecars]
        for names in (order, self.sidecars):
            for name in names:
                self.running[name].terminate()
            for name in names:
                try:
                    codes[name] = self.running[name].wait(30)
                except subprocess.TimeoutExpired:
                    self.running[name].kill()
                    codes[name] = self.running[name].wait()
        return codes

    def log(self, container: dict[str, Any]) -> str:
        """Output of a container."""
        file = self.directory / f"{container['name']}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def _ready(self, container: dict[str, Any]) -> bool:
        assert self.running[container["name"]].poll() is None, self.log(container)
        words = self._words(container, container["startupProbe"]["exec"]["command"])
        environment = self._environment(container)
        return subprocess.run(words, env=environment, capture_output=True, check=False).returncode == 0

    def _start(self, container: dict[str, Any]) -> subprocess.Popen[str]:
        user = container.get("securityContext", {}).get("runAsUser")
        words = self._words(container, [*container["command"], *container.get("args", [])])
        if user is not None:
            words = [*_as_user(user), *words]
        with (self.directory / f"{container['name']}.log").open("a") as log:
            return subprocess.Popen(
                words, env=self._environment(container), cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                text=True,
            )  # fmt: skip

    def _words(self, container: dict[str, Any], words: list[str]) -> list[str]:
        mapped = [self._mapped(container, word) for word in words]
        if mapped[0] not in SCRIPTS:
            return mapped
        module, function = SCRIPTS[mapped[0]].split(":")
        code = f"import sys; sys.argv[0] = {mapped[0]!r}; from {module} import {function} as main; sys.exit(main())"
        return [sys.executable, "-c", code, *mapped[1:]]

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        """The image's, the NVIDIA runtime's, and what the specification says."""
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": str(self.built.sim_dir),
            "NVSHARE_HOOK_LIBRARY": str(self.built.hook),
            "NVSHARE_SIM_STATE": str(self.state),
            "NVSHARE_SIMULATE": self.gpus,
        }
        fields = {"spec.nodeName": "node-1"}
        given = {
            entry["name"]: self._mapped(container, entry["value"])
            if "value" in entry
            else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container.get("env", [])
        }
        return environment | given

    def _mapped(self, container: dict[str, Any], text: str) -> str:
        places = {m["mountPath"]: str(self.places[m["name"]]) for m in container.get("volumeMounts", [])}
        if not places or text.startswith(str(self.directory)):
            return text
        paths = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
        return re.sub(rf"(?<![\w./-])({paths})(?=/|:|$)", lambda match: places[match[1]], text)
