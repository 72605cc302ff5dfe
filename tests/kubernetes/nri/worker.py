"""A worker node: coordinator, NRI plugin and containerd as real processes, the GPU simulated.

A pod's containers have the variables that KAI's binder gives them, and what NVIDIA's runtime would add: the driver.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.slots.slot import Slot, read_all
from nvshare.simulated_gpu import library_directory
from tests.conftest import Built
from tests.daemon.processes import ctl
from tests.end_to_end import conftest as end_to_end
from tests.kubernetes.containerd.runtime import Containerd, Pod
from tests.waiting import eventually

FOREVER = ["/busybox", "sleep", "100000"]


class Worker(end_to_end.Node):
    """One node with a GPU of 8 GiB."""

    def __init__(self, directory: Path, containerd: Containerd, built: Built) -> None:
        super().__init__(directory, "2x8GiB")
        directory.chmod(0o711)
        self.containerd, self._built = containerd, built
        self.slots_dir, self.library_dir = directory / "slots", directory / "lib"
        self.plugin: subprocess.Popen[bytes] | None = None
        self.cluster: dict[str, str] = {}
        """Variables by which the plugin reaches an API server."""
        self._pods: list[Pod] = []

    def install(self) -> None:
        """The DaemonSet's init container."""
        library.install(self._built.hook, self.library_dir, self.slots_dir)

    def start_plugin(self) -> None:
        """Returns when the runtime has configured it and told it its containers."""
        before = self.log("nri").count("connected to")
        command = [sys.executable, "-m", "nvshare.coordinator.kubernetes.nri.plugin_main"]
        places = [("nri-socket", self.containerd.nri_socket), ("slots-dir", self.slots_dir)]
        options = [f"--{name}={path}" for name, path in (*places, ("library-dir", self.library_dir))]
        with (self.directory / "nri.log").open("ab") as log:
            self.plugin = subprocess.Popen(
                [*command, *options, "--on-loss=wait", "--log-level=debug"], env=self.environment() | self.cluster,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.await_connection(before + 1)

    def await_connection(self, count: int) -> None:
        """Until it has been connected so many times."""
        eventually(lambda: self.log("nri").count("connected to") >= count, f"connected\n{self.log('nri')}")

    def stop_plugin(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Its exit code."""
        assert self.plugin is not None
        plugin, self.plugin = self.plugin, None
        plugin.send_signal(number)
        return plugin.wait(60)

    def uuids(self) -> list[str]:
        """Of the node's GPUs."""
        return [str(gpu["uuid"]) for gpu in self.control("status")["gpus"]]

    def pod(self, name: str, annotations: dict[str, str] | None = None) -> Pod:
        """A pod that ends with the test."""
        made = self.containerd.pod(name, annotations)
        self._pods.append(made)
        return made

    def start(self, pod: Pod, command: Sequence[str], name: str = "main", **variables: str) -> str:
        """A container with KAI's variables, by default 0.3 of the first GPU, and more or other ones."""
        return self.contain(
            pod, command, name, {"NVIDIA_VISIBLE_DEVICES": self.uuids()[0], "GPU_PORTION": "0.3"} | variables
        )

    def contain(
        self, pod: Pod, command: Sequence[str], name: str, variables: dict[str, str], cdi: Sequence[str] = ()
    ) -> str:
        """A container with these variables and CDI devices."""
        driver = {"LD_LIBRARY_PATH": "/opt/driver", "NVSHARE_SIM_STATE": "/run/gpus"}
        mounts = [(str(library_directory()), "/opt/driver"), (str(self.state), "/run/gpus")]
        if command[0].startswith("/tmp/"):  # a program of the test's
            mounts.append((command[0], "/program"))
            command = ["/program", *command[1:]]
        return self.containerd.run(pod, name, command, variables | driver, mounts=mounts, cdi=cdi)

    def slots(self) -> dict[str, dict[str, Any]]:
        """The coordinator's slots, by `pod/container`."""
        return {f"{slot['pod']}/{slot['container']}": slot for slot in self.control("slots")["slots"]}

    def slot_files(self) -> dict[str, Slot]:
        """By name."""
        return read_all(self.slots_dir)

    def await_shares(self, *shares: float) -> None:
        """Until the GPU's time since now is divided between as many processes like this, to a fiftieth."""
        began = len(self.trace())

        def divided() -> bool:
            worked: Counter[int] = Counter()
            for busy in self.trace()[began:]:
                worked[busy.process_id] += busy.work_ns
            parts = sorted(work / worked.total() for work in worked.values())
            enough = len(parts) == len(shares) and worked.total() > 3e9
            return enough and all(abs(part - share) <= 0.02 for part, share in zip(parts, sorted(shares), strict=True))

        eventually(divided, f"shares of {shares}")

    def table(self, *words: str) -> str:
        """Text output of `nvshare-ctl`, also of one that tells problems."""
        return ctl(self.directory, *words).stdout

    def close(self) -> None:
        """Ends everything."""
        for pod in self._pods:
            self.containerd.remove_pod(pod)
        if self.plugin is not None:
            self.stop_plugin()
        super().close()


W = TypeVar("W", bound=Worker)


@contextlib.contextmanager
def new_worker(kind: type[W], containerd: Containerd, built: Built) -> Iterator[W]:
    """A node with the hook's library, and a coordinator with slots."""
    made = kind(Path(tempfile.mkdtemp(prefix="nvs-")), containerd, built)
    try:
        made.install()
        made.start_coordinator("--slots-dir", str(made.slots_dir), variables={"NVSHARE_POLICY": "fair_share"})
        yield made
    finally:
        made.close()
        shutil.rmtree(made.directory, ignore_errors=True)
