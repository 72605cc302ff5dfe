"""A worker node: coordinator, DRA driver and containerd as real processes; GPUs, API server and kubelet are doubles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from nvshare.simulated_gpu.environment import simulated_environment
from tests.conftest import Built
from tests.kubernetes.containerd.runtime import Containerd
from tests.kubernetes.dra.allocator import Allocator
from tests.kubernetes.dra.claim_shapes import claim, wanted
from tests.kubernetes.dra.cluster import SLICE, Api, Kubelet
from tests.kubernetes.nri import worker as nri
from tests.waiting import eventually


class Worker(nri.Worker):
    """One node with two GPUs of 8 GiB."""

    def __init__(self, directory: Path, containerd: Containerd, built: Built) -> None:
        super().__init__(directory, containerd, built)
        (directory / "account").mkdir()
        self.api = Api(directory / "account")
        self.kubelet = Kubelet(directory / "k")

    def driver(self, *options: str) -> subprocess.Popen[bytes]:
        """`nvshare-dra`, started."""
        command = [sys.executable, "-m", "nvshare.coordinator.kubernetes.dra.plugin_main", "--node-name=node-1"]
        places = {
            "kubelet-dir": self.directory / "k", "cdi-dir": self.containerd.cdi_dir, "slots-dir": self.slots_dir,
            "library-dir": self.library_dir, "runtime-dir": self.directory,
        }  # fmt: skip
        with (self.directory / "dra.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *(f"--{name}={path}" for name, path in places.items()), "--on-loss=wait", *options],
                env=simulated_environment(self.state, self.simulate, self.environment()) | self.api.environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def start_driver(self, *options: str) -> None:
        """Returns when the kubelet could register it and its GPUs are published."""
        self.plugin = self.driver(*options)
        eventually(lambda: self.kubelet.registry.exists() and SLICE in self.api.objects, f"served\n{self.log('dra')}")
        self.kubelet.accept()

    def scheduled(
        self, pod: str, *requests: dict[str, str], config: tuple[Any, ...] = (), count: int = 1, **more: Any
    ) -> Any:
        """A claim of a pod, allocated by the scheduler's model; `more`: of its `spec.devices`."""
        if not hasattr(self, "_allocator"):
            self._allocator = Allocator(self.api.objects[SLICE]["spec"])
        results = self._allocator.allocate(wanted(*requests, count=count) | more)
        assert results is not None
        made = claim(*results, uid=f"uid-{pod}-gpu", name=f"{pod}-gpu", config=config, pods=(pod,), owner=pod)
        self.api.add(made)
        return made

    def prepare(self, of: Any) -> list[str]:
        """The kubelet's call before a pod's containers start; their CDI devices."""
        answer = self.kubelet.call("NodePrepareResources", of)[of["metadata"]["uid"]]
        assert not answer.error
        return [name for device in answer.devices for name in device.cdi_device_ids]

    def close(self) -> None:
        super().close()
        self.api.close()
        for file in self.containerd.cdi_dir.iterdir():
            file.unlink()
