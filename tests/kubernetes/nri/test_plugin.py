"""The runtime's calls and the slots that follow from them, without a runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.kubernetes.cluster.annotations import Rules
from nvshare.coordinator.kubernetes.cluster.options import Containers
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.nri import messages as m
from nvshare.coordinator.kubernetes.nri.plugin import AWAY, LOST, NO_LIBRARY, OTHER_PRELOAD, Plugin, slot_name
from nvshare.coordinator.kubernetes.slots import slot as slots

UID = "0f3e4c1a-95a2-4bd5-8f50-6f2a1c7f6e21"
PROMISED = ["NVIDIA_VISIBLE_DEVICES=GPU-a", "GPU_PORTION=0.5", "NVSHARE_ON_LOSS=wait"]


class Runtime:
    """Calls the plugin."""

    def __init__(self, directory: Path) -> None:
        (directory / "hook.so").touch()
        self.options = Containers(directory / "slots", directory / "lib")
        library.install(directory / "hook.so", self.options.library_dir, None)
        self.told: list[tuple[str, str]] = []
        """Containers that run without the hook, and why."""
        self.plugin = Plugin(self.options, Rules(), lambda pod, container, why: self.told.append((container.name, why)))

    def call(self, method: str, request: Any, response: Any) -> Any:
        payload, code, text = self.plugin.answer(method, request.SerializeToString())
        return response.FromString(payload) if code == 0 else (code, text)

    def create(self, container: Any, **pod: Any) -> Any:
        request = m.CreateContainerRequest(pod=sandbox(**pod), container=container)
        return self.call("CreateContainer", request, m.CreateContainerResponse)

    def synchronize(self, *containers: Any, more: bool = False) -> Any:
        """The last part has the pod."""
        request = m.SynchronizeRequest(pods=[] if more else [sandbox()], containers=containers, more=more)
        return self.call("Synchronize", request, m.SynchronizeResponse)

    def slots(self) -> dict[str, slots.Slot]:
        """By container."""
        return {slot.pod.container: slot for slot in slots.read_all(self.options.slots_dir).values() if slot.pod}


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """In a short path: sockets must fit into it."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as made:
        yield Runtime(Path(made))


def sandbox(**more: Any) -> Any:
    return m.PodSandbox(**({"id": "sandbox", "name": "pod", "namespace": "team", "uid": UID} | more))


def container(number: str, name: str = "main", *mounts: str, **more: Any) -> Any:
    """`mounts`: PLACE, or PLACE=SOURCE."""
    fields = {"id": number, "pod_sandbox_id": "sandbox", "name": name, "env": PROMISED}
    found = [{"destination": place, "source": source} for place, _, source in (each.partition("=") for each in mounts)]
    return m.Container(**(fields | {"mounts": found} | more))


def test_a_container_gets_slot_and_hook(runtime: Runtime) -> None:
    """Broken: a variable or mount of the pod's own stays in place of the slot's, and the hook finds no coordinator."""
    adjust = runtime.create(container("1", "main", "/run/nvshare")).adjust
    assert [mount.destination for mount in adjust.mounts] == [
        "-/run/nvshare", "/run/nvshare", "/opt/nvshare", "/etc/ld.so.preload",
    ]  # fmt: skip
    place = runtime.options.slots_dir / f"{UID}-main"
    assert adjust.mounts[1].source == str(place)
    assert all(list(mount.options) == ["rbind", "ro"] for mount in adjust.mounts if mount.source)
    names = [each.key for each in adjust.env]
    assert names.index("-NVSHARE_ON_LOSS") < names.index("NVSHARE_ON_LOSS")
    assert {each.key: each.value for each in adjust.env}["NVSHARE_SOCKET"] == "/run/nvshare/hooks.sock"
    slot = slots.read(place)
    assert slot is not None
    assert (slot.gpus, slot.policy, slot.hook_missing) == (("GPU-a",), {"share_request": "0.5"}, "")
    assert slot.library == library.current(runtime.options.library_dir)


def test_what_keeps_the_hook_away_is_told_in_the_slot(runtime: Runtime) -> None:
    """Broken: a container with another preload library is broken, or one without the hook counts as scheduled."""
    assert not runtime.create(container("1", "other", "/etc/ld.so.preload")).adjust.mounts
    (runtime.options.library_dir / library.CURRENT).unlink()
    assert not runtime.create(container("2", "none")).adjust.mounts
    told = {name: slot.hook_missing for name, slot in runtime.slots().items()}
    assert told == {"other": OTHER_PRELOAD, "none": NO_LIBRARY}


def test_names_fit_and_differ() -> None:
    """Broken: a long container name has no slot, or two containers share one."""
    short, long = slot_name(UID, "main"), slot_name(UID, "a" * 63)
    assert short == f"{UID}-main"
    assert slots.check_name(long) == long
    assert long not in (slot_name(UID, "a" * 62), slot_name(UID[::-1], "a" * 63))


def test_the_list_comes_in_parts_and_settles_the_slots(runtime: Runtime) -> None:
    """Broken: after the plugin's absence slots are left behind, or containers without the hook are unknown."""
    for number, name in (("1", "hooked"), ("2", "late"), ("3", "gone")):
        runtime.create(container(number, name))
    foreign = runtime.slots()["gone"].model_copy(update={"slot": "job", "allocation": "x"})
    slots.write(runtime.options.slots_dir, foreign)
    before = runtime.slots()["hooked"]
    mount = f"/run/nvshare={runtime.options.slots_dir}"
    late = container("2", "late", "/run/nvshare=/home")
    assert runtime.synchronize(container("1", "hooked", f"{mount}/a"), late, more=True).more
    lost = container("4", "lost", f"{mount}/b")
    ended = container("5", "ended", state=m.STOPPED)
    assert not runtime.synchronize(lost, container("6", "new"), container("7", "whole", env=[]), ended).more
    told = {name: slot.hook_missing for name, slot in runtime.slots().items() if slot.allocation != "x"}
    assert told == {"hooked": "", "late": AWAY, "lost": LOST, "new": AWAY}
    assert dict(runtime.told) == {"late": AWAY, "lost": LOST, "new": AWAY}
    assert runtime.slots()["hooked"] == before
    assert (runtime.options.slots_dir / "job").is_dir()
    runtime.synchronize(lost, late)
    assert len(runtime.told) == 3, "once for each container"


def test_a_slot_ends_with_its_own_container(runtime: Runtime) -> None:
    """Broken: the end of a container's earlier start takes the slot of the present one."""
    runtime.create(container("1"))
    runtime.create(container("2"))
    runtime.call("StopContainer", m.StopContainerRequest(container=container("1")), m.Empty)
    assert runtime.slots().keys() == {"main"}
    event = m.StateChangeEvent(event=m.CREATE_CONTAINER, container=container("2"))
    runtime.call("StateChange", event, m.Empty)
    assert runtime.slots().keys() == {"main"}
    runtime.call("StateChange", m.StateChangeEvent(event=m.REMOVE_CONTAINER, container=container("2")), m.Empty)
    assert not runtime.slots()


def test_the_plugin_fails_open(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """Broken: a fault of ours keeps containers from starting, or takes the plugin away from all others."""
    runtime.options.slots_dir.rmdir()
    runtime.options.slots_dir.touch()
    assert not runtime.create(container("1")).adjust.mounts
    assert not runtime.create(container("1"), uid="../../etc").adjust.mounts
    assert caplog.text.count("team/pod/main runs without the hook: it has no slot: ") == 2
    assert len(runtime.told) == 2
    assert runtime.plugin.answer("PostStartContainer", b"")[1] == m.UNIMPLEMENTED


def test_a_wrong_limit_is_an_answer(runtime: Runtime) -> None:
    """Broken: the kubelet's event does not say what is wrong, or a slot is made all the same."""
    code, text = runtime.create(container("1", env=[*PROMISED, "CUDA_DEVICE_MEMORY_LIMIT=x"]))
    assert code == m.UNKNOWN
    assert text.startswith("nvshare: CUDA_DEVICE_MEMORY_LIMIT: 'x' is not a size of GPU memory")
    assert not runtime.slots()
