"""A real kubelet and a real scheduler give out our slots, and real containers share the simulated GPU by them.

The device plugin and the coordinator run beside it, as in the other tests of nodes; the kubelet's double is not there.

Non-goals: what the plugin answers (test_node.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.trace import overlaps
from tests.conftest import Built
from tests.kubernetes.node.kubelet import Kubelet
from tests.kubernetes.node.processes import GPU, Node, new_node
from tests.kubernetes.real.control_plane import ControlPlane, control_plane
from tests.kubernetes.real.real_node import (
    DEVICE_PLUGINS,
    DRIVER_IN_IMAGE,
    IMAGE,
    RealNode,
    fill_root,
    make_image,
    obstacle,
    one_at_a_time,
    real_node,
)
from tests.waiting import eventually

MEMORY = "nvshare.com/gpu-memory-256mib"
LONG = ["/saturate", "600", "1000000", "4"]
ONE = {GPU: "1"}


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of the real kubelet; nothing else of the double is asked for."""

    plugins: Path
    pod_resources: Path

    def stop(self) -> None:
        """The kubelet is not the rig's."""


@pytest.fixture(scope="module")
def real(
    plane: ControlPlane, built: Built, saturate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealNode]:
    """A ready node.  `plane`: only to be skipped where there is none."""
    with one_at_a_time():
        reason = obstacle()
        if reason is not None:
            pytest.skip(reason)
        yield from _started(built, saturate, tmp_path_factory)


def _started(built: Built, saturate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    with control_plane(tmp_path_factory.mktemp("cluster")) as own, real_node(own, os.environ.get("CC", "cc")) as made:
        root = made.directory / "root"
        fill_root(root, [saturate, Path("/bin/sh"), Path("/bin/sleep")], built.sim_dir, [built.hook])
        environment = {
            "PATH": "/",
            "LD_LIBRARY_PATH": DRIVER_IN_IMAGE,
            "NVSHARE_SIM_STATE": f"/gpu/{RuntimeDir(Path('/')).simulated_gpu.name}",
            "NVSHARE_SIMULATE": "1x4GiB",
        }
        make_image(made.directory, IMAGE, root, environment)
        yield made


@pytest.fixture
def node(real: RealNode, built: Built) -> Iterator[Node]:
    """Library and coordinator of this test's own, for the real kubelet; all of its pods are gone afterwards."""
    with new_node(built.hook) as rig:
        rig.kubelet.stop()
        rig.kubelet = cast(Kubelet, Places(DEVICE_PLUGINS, real.pod_resources))
        rig.runtime.path.mkdir(exist_ok=True)
        rig.install()
        rig.start_coordinator()
        real.shared = rig.runtime.path
        try:
            yield rig
        finally:
            real.remove_all()
            if rig.plugin is not None and rig.plugin.poll() is None:
                rig.stop(rig.plugin)
            eventually(lambda: real.allocatable(GPU) == 0, "the slots are gone", 120)


def start_plugin(real: RealNode, node: Node, slots: int, *options: str) -> None:
    """Returns when the cluster's scheduler can give the slots out."""
    node.start_plugin("--slots-per-gpu", str(slots), *options)
    eventually(lambda: real.allocatable(GPU) == slots, f"{slots} slots of the node\n{node.log('plugin')}", 120)


def turns(node: Node, more: int = 4) -> None:
    """Waits for so many hand-overs from now."""
    before = int(node.status()["gpus"][0]["handovers"])
    eventually(lambda: node.status()["gpus"][0]["handovers"] >= before + more, f"turns\n{node.log('coordinator')}")


def test_two_pods_share_a_gpu(real: RealNode, node: Node) -> None:
    """Registered, advertised, placed, allocated, started, in turns, told apart: the product on Kubernetes."""
    start_plugin(real, node, 3)
    for name in ("first", "second"):
        real.run(name, LONG, ONE)
    for name in ("first", "second"):
        real.await_phase(name, "Running")
    turns(node)
    eventually(lambda: {"first", "second"} <= set(node.slots()), "the pods' names")
    shown = node.control("slots")
    assert "default/first/main" in shown
    for name in ("first", "second"):
        assert node.slots()[name]["clients"] == 1, real.output(name)
        real.remove(name)
    assert not overlaps(node.trace())
    used = {slot.device_ids for slot in node.slot_files().values()}
    assert len(used) == 2


def test_what_cannot_be_given_is_refused_in_words(real: RealNode, node: Node) -> None:
    """A pod that asks for two slots of one GPU, and one for which none is left, must say why they do not run."""
    start_plugin(real, node, 3)
    real.run("greedy", LONG, {GPU: "2"})
    failed = eventually(lambda: _failed(real, "greedy"), "the pod to be refused")
    assert failed["reason"] == "UnexpectedAdmissionError"
    assert "2 slots of the same GPU" in failed["message"]
    assert "--allow-several-slots" in failed["message"]
    real.remove("greedy")
    for name in ("one", "two", "three"):
        real.run(name, LONG, ONE)
    for name in ("one", "two", "three"):
        real.await_phase(name, "Running")
    real.run("four", LONG, ONE)
    eventually(lambda: any(f"Insufficient {GPU}" in text for text in real.events("four")), "the scheduler's event")
    real.remove("two")  # its slot is free at once, whatever is left of its directory
    real.await_phase("four", "Running")
    eventually(lambda: "four" in node.slots() and node.slots()["four"]["clients"] == 1, "the new owner's process")


def _failed(real: RealNode, name: str) -> dict[str, str]:
    status = real.pod(name)["status"]
    return {key: status.get(key, "") for key in ("reason", "message")} if status.get("phase") == "Failed" else {}


def test_a_restarted_kubelet_gets_everything_again(real: RealNode, node: Node) -> None:
    """A kubelet forgets its plugins when it restarts: slots must come back, and running pods keep theirs."""
    start_plugin(real, node, 2)
    real.run("job", LONG, ONE)
    started = real.await_phase("job", "Running")["status"]["containerStatuses"][0]["containerID"]
    eventually(lambda: "job" in node.slots(), "the slot's pod")
    before = node.slot_files()
    real.plane.stop("kubelet")
    real.start_kubelet()
    registered = "nvshare_plugin_registrations_total"
    eventually(lambda: node.series("plugin", registered, outcome="registered") == [2], "another registration")
    real.run("next", LONG, ONE)
    real.await_phase("next", "Running")
    turns(node)
    now = real.await_phase("job", "Running")["status"]["containerStatuses"][0]
    assert (now["containerID"], now["restartCount"]) == (started, 0)
    files = node.slot_files()
    assert all(files[name].allocation == slot.allocation for name, slot in before.items())
    assert len(files) == 2


def test_a_container_that_starts_again_finds_its_slot(real: RealNode, node: Node) -> None:
    """The kubelet replays the answer that it remembers: what it mounts must be there, and lead to the coordinator."""
    start_plugin(real, node, 1)
    real.run("again", ["/sh", "-c", "/saturate 1 1000000 2; exit 1"], ONE, restartPolicy="OnFailure")
    eventually(lambda: "again" in node.slots() and node.slots()["again"]["leases"] >= 1, "the first process")
    first = node.slots()["again"]["leases"]
    eventually(lambda: real.pod("again")["status"]["containerStatuses"][0]["restartCount"] >= 1, "another start", 120)
    eventually(lambda: node.slots()["again"]["leases"] > first, "its process has a lease", 120)


def test_the_plugin_may_go_and_come(real: RealNode, node: Node) -> None:
    """An upgrade of the DaemonSet must not disturb who runs; without a plugin nobody new is placed."""
    start_plugin(real, node, 2)
    real.run("job", LONG, ONE)
    real.await_phase("job", "Running")
    eventually(lambda: "job" in node.slots(), "the slot's pod")
    before = node.slot_files()
    assert node.stop(node.plugin) == 0
    eventually(lambda: real.allocatable(GPU) == 0, "no slot to give out", 120)
    assert real.pod("job")["status"]["phase"] == "Running"
    start_plugin(real, node, 2)
    assert node.slot_files() == before
    real.run("next", LONG, ONE)
    real.await_phase("next", "Running")
    turns(node)


def test_unhealthy_slots_are_not_given_out(real: RealNode, node: Node) -> None:
    """With nobody there to grant the GPU, the node must say so, and again when there is."""
    start_plugin(real, node, 2, "--coordinator-grace", "1ms")
    real.run("job", LONG, ONE)
    real.await_phase("job", "Running")
    assert node.stop(node.coordinator) == 0
    eventually(lambda: real.allocatable(GPU) == 0, "no slot is healthy", 120)
    real.run("late", LONG, ONE)
    eventually(lambda: any(f"Insufficient {GPU}" in text for text in real.events("late")), "the scheduler's event")
    status = real.pod("job")["status"]
    assert status["phase"] == "Running"
    (shown,) = status["containerStatuses"][0].get("allocatedResourcesStatus") or [{"resources": []}]  # from 1.36 on
    assert all(each["resourceID"].startswith("GPU-") for each in shown["resources"])
    node.start_coordinator()
    real.await_phase("late", "Running")
    turns(node)


def test_memory_becomes_the_slots_limit(real: RealNode, node: Node) -> None:
    """The second resource: the scheduler packs by it, and the kubelet's PodResources say whose units they are."""
    start_plugin(real, node, 4, "--memory-resource", MEMORY)
    eventually(lambda: real.allocatable(MEMORY) == 16, "16 units of memory", 120)
    real.run("small", LONG, {GPU: "1", MEMORY: "4"})
    real.run("large", LONG, {GPU: "1", MEMORY: "12"})
    for name, limit in (("small", 1 << 30), ("large", 3 << 30)):
        real.await_phase(name, "Running")
        eventually(lambda n=name, b=limit: node.slots().get(n, {}).get("limit_bytes") == b, f"{name}'s limit")  # type: ignore[misc]
    real.run("beyond", LONG, {GPU: "1", MEMORY: "1"})
    eventually(lambda: any(f"Insufficient {MEMORY}" in text for text in real.events("beyond")), "the scheduler's event")
