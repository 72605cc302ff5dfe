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
from pathlib import Path
from typing import Any

from nvshare.client_hook.launcher import SYSTEM_PRELOAD
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.kubernetes.slots.slot import Slot, read_all
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.environment import simulated_environment
from tests.daemon.processes import ctl
from tests.end_to_end import conftest as end_to_end
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


class Node(end_to_end.Node):
    """One node.  Its directory is the coordinator's too; its path is short: sockets must fit into it."""

    def __init__(self, directory: Path, hook: Path, simulate: str) -> None:
        super().__init__(directory, simulate)
        self.hook = hook
        self.kubelet = Kubelet(directory / "kubelet")
        self.runtime = RuntimeDir(directory)
        self.slots_dir, self.library_dir = directory / "slots", directory / "lib"
        self.real_mounts = mounts_work()
        self.plugin: subprocess.Popen[bytes] | None = None
        self.plugin_environment: dict[str, str] = {}

    # --- the DaemonSet ------------------------------------------------------------------------------------------------

    def install(self, hook: Path | None = None) -> str:
        """The init container; returns the version's name."""
        command = [sys.executable, "-c", "from nvshare.coordinator.kubernetes.node.library import main; main()"]
        done = subprocess.run(
            [*command, "--to", str(self.library_dir), "--slots-dir", str(self.slots_dir)],
            env=self.environment() | {"NVSHARE_HOOK_LIBRARY": str(hook or self.hook)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip()).name

    def start_coordinator(self, *options: str, variables: dict[str, str] | None = None) -> None:
        """Returns when it serves slots and metrics."""
        super().start_coordinator(
            "--slots-dir", str(self.slots_dir), "--metrics-port", "0", *options, variables=variables
        )

    def start_plugin(self, *options: str) -> None:
        """Returns when it runs; wait for what it registers."""
        command = [sys.executable, "-m", "nvshare.coordinator.kubernetes.node.plugin_main"]
        paths = [
            "--plugin-dir", str(self.kubelet.plugins), "--pod-resources-socket", str(self.kubelet.pod_resources),
            "--library-dir", str(self.library_dir), "--slots-dir", str(self.slots_dir),
            "--runtime-dir", str(self.runtime.path), "--slots-per-gpu=10", "--on-loss=wait",
        ]  # fmt: skip
        environment = simulated_environment(self.state, self.simulate, self.environment())
        with (self.directory / "plugin.log").open("ab") as log:
            self.plugin = subprocess.Popen(
                [*command, *paths, "--metrics-port", "0", "--metrics-address", "127.0.0.1", *options],
                env=environment | self.plugin_environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self, process: subprocess.Popen[bytes] | None) -> int:
        """As the kubelet ends a container: SIGTERM."""
        assert process is not None
        process.terminate()
        return process.wait(60)

    # --- containers ---------------------------------------------------------------------------------------------------

    def contain(
        self, grant: Grant, command: Sequence[str], *, user: int | None = None
    ) -> subprocess.Popen[str]:
        """Starts a container's process.  The image's environment comes first and Allocate's wins, as at the kubelet."""
        base = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_") and k != "LD_PRELOAD"}
        environment = simulated_environment(self.state, self.simulate, base) | grant.environment
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
        return self._start(line, environment)

    # --- looking ------------------------------------------------------------------------------------------------------

    def status(self) -> Any:
        """As `nvshare-ctl status` gets it."""
        return call(self.runtime, api.Status())

    def table(self, *words: str) -> str:
        """Text output of `nvshare-ctl`."""
        done = ctl(self.directory, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def slots(self) -> dict[str, Any]:
        """The coordinator's slots, by pod."""
        return {slot["pod"]: slot for slot in self.status()["slots"]}

    def slot_files(self) -> dict[str, Slot]:
        return read_all(self.slots_dir)

    def series(self, who: str, name: str, **labels: str) -> list[float]:
        """Values of the series with this name and these labels, by one scrape."""
        marker = "metrics on http://127.0.0.1:" if who == "coordinator" else "metrics on port "
        eventually(lambda: marker in self.log(who), f"{who} serves metrics")
        port = self.log(who).rpartition(marker)[2].split("/")[0].split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [(series, value) for series, _, value in lines if series.partition("{")[0] == name]
        return [float(value) for series, value in found if all(label in series for label in wanted)]

    def close(self) -> None:
        """Ends everything."""
        if self.plugin is not None and self.plugin.poll() is None:
            self.stop(self.plugin)
        super().close()
        self.kubelet.stop()


@contextmanager
def new_node(hook: Path) -> Iterator[Node]:
    """A node whose kubelet runs; the rest is up to the test."""
    directory = Path(tempfile.mkdtemp(prefix="nvk-"))
    node = Node(directory, hook, "1x4GiB")
    directory.chmod(0o711)  # containers' users reach the hook and the driver's double below it
    node.kubelet.start()
    try:
        yield node
    finally:
        node.close()
        shutil.rmtree(directory, ignore_errors=True)
