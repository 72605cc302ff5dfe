"""A Kubernetes node of one's own: kubelet double, and the coordinator, the plugin and containers as real processes.

A container is a real process with exactly the environment and the mounts that Allocate returned, plus what its image
would bring: here the simulated driver.  As root the mounts are real (a mount namespace); otherwise the container's
paths in the environment are replaced by the host's, which is said once in a warning.

Invariants: everything that a test starts is gone after it; every wait has a bound.

Non-goals: anything that stands in for a part of the product.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvshare.client_hook.launcher import SYSTEM_PRELOAD
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.kubernetes.slots.slot import Slot, read_all
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.trace import Busy, read_trace
from tests.conftest import ROOT
from tests.daemon.processes import ctl
from tests.kubernetes.node.kubelet import Grant, Kubelet
from tests.waiting import eventually

ENTER = Path(__file__).parent / "enter_container.py"
GPU = "nvshare.com/gpu"


def mounts_work() -> bool:
    """Whether this user may make mount namespaces."""
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return done.returncode == 0


@dataclass
class Node:
    """One node.  Paths are short: sockets must fit into them."""

    directory: Path
    hook: Path
    simulate: str
    kubelet: Kubelet
    real_mounts: bool
    coordinator: subprocess.Popen[bytes] | None = None
    plugin: subprocess.Popen[bytes] | None = None
    containers: list[subprocess.Popen[str]] = field(default_factory=list)
    plugin_environment: dict[str, str] = field(default_factory=dict)

    @property
    def runtime(self) -> RuntimeDir:
        return RuntimeDir(self.directory / "run")

    @property
    def slots_dir(self) -> Path:
        return self.directory / "slots"

    @property
    def library_dir(self) -> Path:
        return self.directory / "lib"

    @property
    def state(self) -> Path:
        """The shared state of the simulated GPUs."""
        return self.runtime.simulated_gpu

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of the node's own programs."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_") and k != "LD_PRELOAD"}
        return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **self.driver(), **more}

    def driver(self) -> dict[str, str]:
        """Variables that lead to the simulated driver; on a real node the container runtime brings the real one."""
        directory = os.environ["NVSHARE_SIM_LIBRARY_DIR"]
        return {
            "LD_LIBRARY_PATH": directory,
            "NVSHARE_SIM_LIBRARY_DIR": directory,
            "NVSHARE_SIM_STATE": str(self.state),
            "NVSHARE_SIMULATE": self.simulate,
        }

    # --- the DaemonSet ------------------------------------------------------------------------------------------------

    def install(self, hook: Path | None = None) -> str:
        """The init container; returns the version's name."""
        command = [sys.executable, "-c", "from nvshare.coordinator.kubernetes.node.library import main; main()"]
        done = subprocess.run(
            [*command, "--to", str(self.library_dir), "--slots-dir", str(self.slots_dir)],
            env=self.environment(NVSHARE_HOOK_LIBRARY=str(hook or self.hook)),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip()).name

    def start_coordinator(self, *options: str) -> None:
        """Returns when it serves, with turns of 100 ms by default."""
        ready, report = os.pipe()
        command = [
            sys.executable,
            "-m",
            "nvshare.coordinator.daemon.main",
            f"--simulate={self.simulate}",
            "--ready-fd",
            str(report),
            "--policy=round_robin",
            "--quantum=100ms",
        ]
        paths = ["--runtime-dir", str(self.runtime.path), "--slots-dir", str(self.slots_dir)]
        with (self.directory / "coordinator.log").open("ab") as log:
            self.coordinator = subprocess.Popen(
                [*command, *paths, "--metrics-port", "0", *options],
                env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(report,),
            )  # fmt: skip
        os.close(report)
        with os.fdopen(ready, "rb") as told:
            assert told.read(1), self.log("coordinator")

    def start_plugin(self, *options: str) -> None:
        """Returns when it runs; wait for what it registers."""
        command = [sys.executable, "-m", "nvshare.coordinator.kubernetes.node.plugin_main"]
        paths = [
            "--plugin-dir", str(self.kubelet.plugins), "--pod-resources-socket", str(self.kubelet.pod_resources),
            "--library-dir", str(self.library_dir), "--slots-dir", str(self.slots_dir),
            "--runtime-dir", str(self.runtime.path), "--slots-per-gpu=10", "--on-loss=wait",
        ]  # fmt: skip
        with (self.directory / "plugin.log").open("ab") as log:
            self.plugin = subprocess.Popen(
                [*command, *paths, "--metrics-port", "0", "--metrics-address", "127.0.0.1", *options],
                env=self.environment(**self.plugin_environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self, process: subprocess.Popen[bytes] | None) -> int:
        """As the kubelet ends a container: SIGTERM."""
        assert process is not None
        process.terminate()
        return process.wait(60)

    def log(self, who: str) -> str:
        log = self.directory / f"{who}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    # --- containers ---------------------------------------------------------------------------------------------------

    def run(
        self, grant: Grant, command: Sequence[str], *, image: dict[str, str] | None = None, user: int | None = None
    ) -> subprocess.Popen[str]:
        """Starts a container's process.  The image's environment comes first and Allocate's wins, as at the kubelet."""
        base = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_") and k != "LD_PRELOAD"}
        environment = {**base, **self.driver(), **(image or {}), **grant.environment}
        line = list(command)
        if user is not None:
            line = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *line]
        if self.real_mounts:
            spec = self.directory / f"mounts-{grant.pod}.json"
            spec.write_text(json.dumps(grant.mounts))
            # The variables are the container's: what enters the container does not have them.
            inner = ["env", *(f"{name}={value}" for name, value in environment.items()), *line]
            line = [sys.executable, str(ENTER), str(spec), *inner]
            environment = base
        else:
            warnings.warn("not root: containers' paths are replaced by the host's, nothing is mounted", stacklevel=2)
            mounts = {container_path: host_path for host_path, container_path in grant.mounts}
            if file := mounts.get(SYSTEM_PRELOAD):
                entry = Path(file).read_text(encoding="ascii").strip()
                environment["LD_PRELOAD"] = f"{environment.get('LD_PRELOAD', '')}:{entry}"
            for container_path, host_path in mounts.items():
                environment = {name: value.replace(container_path, host_path) for name, value in environment.items()}
        process = subprocess.Popen(
            line, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.containers.append(process)
        return process

    # --- looking ------------------------------------------------------------------------------------------------------

    def status(self) -> Any:
        """As `nvshare-ctl status` gets it."""
        return call(self.runtime, api.Status())

    def control(self, *words: str) -> str:
        """Text output of `nvshare-ctl`."""
        done = ctl(self.runtime.path, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def slots(self) -> dict[str, Any]:
        """The coordinator's slots, by pod."""
        return {slot["pod"]: slot for slot in self.status()["slots"]}

    def slot_files(self) -> dict[str, Slot]:
        return read_all(self.slots_dir)

    def trace(self) -> list[Busy]:
        return list(read_trace(self.state)) if self.state.exists() else []

    def metrics(self, who: str) -> dict[str, float]:
        """One scrape: series -> value."""
        marker = "metrics on http://127.0.0.1:" if who == "coordinator" else "metrics on port "
        eventually(lambda: marker in self.log(who), f"{who} serves metrics")
        port = self.log(who).rpartition(marker)[2].split("/")[0].split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        series = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in series}

    def series(self, who: str, name: str, **labels: str) -> list[float]:
        """Values of the series with this name and these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return [
            value
            for series, value in self.metrics(who).items()
            if series.partition("{")[0] == name and all(label in series for label in wanted)
        ]

    def close(self) -> None:
        """Ends everything."""
        for container in self.containers:
            if container.poll() is None:
                container.kill()
            container.wait()
            for stream in (container.stdout, container.stderr):
                if stream is not None:
                    stream.close()
        for process in (self.plugin, self.coordinator):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.kubelet.stop()


@contextmanager
def new_node(hook: Path, simulate: str = "1x4GiB") -> Iterator[Node]:
    """A node whose kubelet runs; the rest is up to the test."""
    directory = Path(tempfile.mkdtemp(prefix="nvk-"))
    kubelet = Kubelet(directory / "kubelet")
    node = Node(directory, hook, simulate, kubelet, mounts_work())
    directory.chmod(0o711)  # containers' users reach the hook and the driver's double below it
    kubelet.start()
    try:
        yield node
    finally:
        node.close()
        shutil.rmtree(directory, ignore_errors=True)


def finish(process: subprocess.Popen[str], seconds: float = 60.0) -> dict[str, Any]:
    """Waits for a program that must succeed; its last line as JSON."""
    out, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{errors}"
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1]) if out.strip() else {}
    return found
