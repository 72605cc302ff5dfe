"""Owners of slots by the kubelet's answers, and the health of GPUs: with stand-ins for kubelet and driver."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nvshare.coordinator.kubernetes.cluster.options import Containers, Options
from nvshare.coordinator.kubernetes.node import allocation
from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.node.allocation import SlotStore
from nvshare.coordinator.kubernetes.node.health import Monitor
from nvshare.coordinator.kubernetes.node.plugin_process import Plugin
from nvshare.coordinator.kubernetes.node.tenancy import KEEP_S, Tenancy, Tenant, tenants_in
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.device_ids import SlotId
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot
from nvshare.coordinator.system.devices import Device, NoGpuError
from tests.kubernetes.node.kubelet import Kubelet
from tests.kubernetes.node.processes import GPU, new_node

UUID = "GPU-11111111-0000-4000-8000-000000000000"
MIG = "MIG-22222222-0000-4000-8000-000000000000"
S = 1_000_000_000


class Rig:
    """Slots on disk, and a kubelet that says what the test wants."""

    def __init__(self, directory: Path, policy: dict[str, str] | None = None) -> None:
        self.store = SlotStore(directory)
        self.tenants: list[Tenant] = []
        self.now_s = 0.0
        self.said = policy
        self.tenancy = Tenancy(self.store, self._ask, policies=self, clock=lambda: self.now_s)

    def _ask(self) -> list[Tenant]:
        return self.tenants

    def policy(self, namespace: str, pod: str, container: str) -> dict[str, str] | None:
        assert (namespace, container) == ("n", "c")
        return self.said

    def allocate(self, *numbers: int) -> Slot:
        slot = allocation.new_slot([SlotId(UUID, number) for number in numbers], "1-abc")
        self.store.allocate(slot.model_copy(update={"allocated_at_s": self.now_s}))
        return self.store.all()[slot.slot]

    def tenant(self, slot: Slot) -> Tenant:
        return Tenant(PodRef(namespace="n", name="p", container="c"), slot.device_ids)


def test_one_impossible_pod_hides_no_other() -> None:
    """Broken: a name that no API server accepts ends the thread, and no slot learns its pod any more."""

    def pod(name: str, number: int) -> object:
        devices = {"resource_name": "r", "device_ids": [f"{UUID}::{number}"]}
        return {"namespace": "n", "name": name, "containers": [{"name": "c", "devices": [devices]}]}

    answer = m.ListPodResourcesResponse(pod_resources=[pod("p" * 300, 0), pod("", 1), pod("good", 2)])
    (found,) = tenants_in(answer, "r")
    assert (found.pod.name, found.slots) == ("good", (f"{UUID}::2",))


def test_a_slot_learns_its_pod_and_annotations(tmp_path: Path) -> None:
    """Else metrics name no pod, and annotations have no effect."""
    rig = Rig(tmp_path, {"priority": "7"})
    slot = rig.allocate(0)
    assert not rig.tenancy.look()
    rig.tenants = [rig.tenant(slot)]
    assert rig.tenancy.look()
    found = rig.store.all()[slot.slot]
    assert (found.pod, found.policy) == (rig.tenants[0].pod, {"priority": "7"})
    rig.said = None  # the pod is not known for a moment: what it said stays
    rig.tenancy.look()
    assert rig.store.all()[slot.slot].policy == {"priority": "7"}
    rig.said = {}
    rig.tenancy.look()
    assert rig.store.all()[slot.slot].policy == {}


def test_a_slot_goes_only_when_its_container_is_surely_gone(tmp_path: Path) -> None:
    """Else a container that is just being made, or missed in one answer, is cut off."""
    rig = Rig(tmp_path)
    slot = rig.allocate(0)
    rig.tenants = [rig.tenant(slot)]
    rig.tenancy.look()
    rig.tenants = []
    rig.now_s = KEEP_S - 1
    rig.tenancy.look()
    rig.tenancy.look()
    assert rig.store.all()
    rig.now_s = KEEP_S
    rig.tenants = [rig.tenant(slot)]
    rig.tenancy.look()
    rig.tenants = []
    rig.tenancy.look()
    assert rig.store.all()
    rig.tenancy.look()
    assert not rig.store.all()


def test_an_answer_about_an_earlier_owner_changes_nothing(tmp_path: Path) -> None:
    """Else a new pod's slot gets the old one's limit, or is removed, because the two crossed."""
    rig = Rig(tmp_path)
    earlier = rig.allocate(0)
    later = rig.allocate(0)
    assert later.slot == earlier.slot
    changed = earlier.model_copy(update={"policy": {"memory_limit": "5"}})
    assert not rig.store.replace(earlier, changed)
    assert not rig.store.remove(earlier)
    assert rig.store.all() == {later.slot: later}


def test_a_devices_new_owner_takes_it_from_the_old_slot(tmp_path: Path) -> None:
    """Else two slots have the same device, and the older one's figures never end."""
    rig = Rig(tmp_path)
    two = rig.allocate(0, 1)
    one = rig.allocate(1)
    assert set(rig.store.all()) == {one.slot}
    assert one.slot != two.slot


def test_a_missing_slot_is_made_again(tmp_path: Path) -> None:
    """Else a node that was started anew has containers without slots: the kubelet does not ask again."""
    rig = Rig(tmp_path, {"memory_limit": "64MiB"})
    slot = rig.allocate(3)
    rig.tenants = [rig.tenant(slot)]
    slots.remove(tmp_path, slot.slot)
    rig.tenancy.look()
    found = rig.store.all()[slot.slot]
    assert (found.device_ids, found.library, found.limit_bytes) == (slot.device_ids, "", 64 << 20)
    assert found.pod == rig.tenants[0].pod


class Driver:
    """GPUs that come, go and fall ill."""

    def __init__(self) -> None:
        self.found = [Device(0, UUID, "card", 8 << 30), Device(1, MIG, "instance", 1 << 30, is_mig=True)]
        self.ill: dict[str, str] = {}

    def devices(self) -> list[Device]:
        if self.ill:
            raise NoGpuError("NVML does not describe the GPUs (GPU is lost); check `nvidia-smi`")
        return self.found

    def problems(self, uuids: Sequence[str]) -> dict[str, str]:
        return {uuid: why for uuid, why in self.ill.items() if uuid in uuids}


def test_health_follows_gpus_and_the_coordinator() -> None:
    """Else pods are sent to a GPU that is lost, or to a node where nobody grants leases; or an upgrade flaps."""
    driver = Driver()
    up = [True]
    monitor = Monitor(driver, lambda: up[0], 30 * S)
    told: list[None] = []
    monitor.listen(lambda: told.append(None))
    base = 1000 * S
    monitor.check(base)
    assert monitor.state.health() == {UUID: True, MIG: True}
    monitor.check(base + S)
    assert len(told) == 1  # nothing changed, nobody is told
    driver.ill = {UUID: "GPU is lost"}
    monitor.check(base + 2 * S)
    assert monitor.state.health() == {UUID: False, MIG: True}
    driver.ill = {}
    up[0] = False
    monitor.check(base + 3 * S)
    assert monitor.state.health() == {UUID: True, MIG: True}
    monitor.check(base + 60 * S)
    assert monitor.state.health() == {UUID: False, MIG: False}
    up[0] = True
    monitor.check(base + 61 * S)
    driver.found = [*driver.found, Device(2, "MIG-new", "instance", 1 << 30, is_mig=True)]
    monitor.check(base + 62 * S)
    assert monitor.state.health() == {UUID: True, MIG: True, "MIG-new": True}
    assert len(told) == 6


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Kubelet, Plugin, Driver]]:
    """The plugin in this process, on a driver of the test's own."""
    with new_node(tmp_path / "unused") as node:
        built = tmp_path / "libnvshare_hook.so"
        built.write_bytes(b"a library")
        from nvshare.coordinator.kubernetes.node import library

        library.install(built, node.library_dir, node.slots_dir)
        kubelet = node.kubelet
        options = Options(
            Containers(node.slots_dir, node.library_dir),
            kubelet.plugins,
            kubelet.pod_resources,
            node.runtime.path,
            slots_per_gpu=3,
        )
        driver = Driver()
        plugin = Plugin(replace(options, coordinator_grace_ns=1 << 60), driver)
        thread = threading.Thread(target=plugin.run)
        thread.start()
        try:
            yield node.kubelet, plugin, driver
        finally:
            plugin.stop()
            thread.join()


def test_a_lost_gpu_is_told_with_the_full_list(served: tuple[Kubelet, Plugin, Driver]) -> None:
    """Else the kubelet keeps giving out slots of a lost GPU, or takes the slots of the others for gone."""
    kubelet, plugin, driver = served
    both = kubelet.await_devices(GPU, 6)
    driver.ill = {UUID: "GPU is lost"}
    plugin.monitor.check(1)
    ill = kubelet.await_devices(GPU, 3)
    assert ill.keys() == both.keys()
    assert {name for name, healthy in ill.items() if healthy} == {f"{MIG}::{number}" for number in range(3)}
    driver.ill = {}
    plugin.monitor.check(2)
    kubelet.await_devices(GPU, 6)


def test_slots_of_several_gpus_are_one_slot_with_one_socket(served: tuple[Kubelet, Plugin, Driver]) -> None:
    """Else a container with two GPUs has one connection and no right to the second; MIG instances are GPUs here."""
    kubelet, plugin, _ = served
    kubelet.await_devices(GPU, 6)
    grant = kubelet.admit("wide", {GPU: 2})
    assert set(grant.environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == {UUID, MIG}
    (slot,) = plugin.store.all().values()
    assert set(slot.gpus) == {UUID, MIG}
    assert len({device.partition("::")[0] for device in grant.devices[GPU]}) == 2
