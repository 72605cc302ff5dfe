"""Claims prepared over the kubelet's sockets."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.kubernetes.cluster.options import Containers
from nvshare.coordinator.kubernetes.dra import messages as m
from nvshare.coordinator.kubernetes.dra.driver import Driver
from nvshare.coordinator.kubernetes.dra.service import Service
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.unix_grpc import call
from tests.kubernetes.dra.claim_shapes import claim, parameters, result

UUIDS = {"gpu-a": "GPU-a", "gpu-b": "GPU-b"}


class Node:
    """A driver, the kubelet's side of its sockets, and the API server's claims."""

    def __init__(self, folder: Path) -> None:
        hook = folder / "hook.so"
        hook.write_bytes(b"hook")
        self.version = library.install(hook, folder / "lib", None)
        self.options = Containers(folder / "slots", folder / "lib", folder / "cdi", cdi_kind="nvidia.com/gpu")
        self.kubelet = folder / "kubelet"
        self.claims: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        self.driver = Driver(self.options, lambda: UUIDS)
        self.service = Service(self.driver, lambda namespace, name: self.claims[name], self.kubelet)
        self.service.start()

    def call(self, method: str, *uids: str, version: str = "v1") -> Any:
        path = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/{method}"
        asked = [m.Claim(namespace="default", uid=uid, name=f"claim-{uid}") for uid in uids]
        request, kind = m.ClaimsRequest(claims=asked), getattr(m, method + "Response")
        return call(self.service.endpoint, path, request, kind, 20).claims

    def add(self, uid: str, *results: Any, config: tuple[Any, ...] = ()) -> None:
        self.claims[f"claim-{uid}"] = claim(*results, uid=uid, name=f"claim-{uid}", config=config)

    def slot_in_container(self, devices: Any, requests: list[str]) -> slots.Slot:
        """Of a container that names these requests of its claim; none: the claim.

        The kubelet names the CDI devices of these requests, and of several edits the runtime leaves the last.
        """
        edits = {
            f"{document['kind']}={device['name']}": device["containerEdits"]
            for file in self.options.cdi_dir.iterdir()
            for document in [json.loads(file.read_text())]
            for device in document["devices"]
        }
        mounted: dict[str, str] = {}
        environment: dict[str, str] = {}
        for device in devices:
            for name in device.cdi_device_ids:
                if name in edits and (not requests or set(device.request_names) & set(requests)):
                    mounted |= {mount["containerPath"]: mount["hostPath"] for mount in edits[name]["mounts"]}
                    environment |= dict(each.split("=", 1) for each in edits[name]["env"])
        found = slots.read(Path(mounted["/run/nvshare"]))
        assert found is not None
        assert environment["NVIDIA_VISIBLE_DEVICES"] == ",".join(found.gpus)
        return found

    def files(self) -> list[str]:
        found = [*self.options.slots_dir.iterdir(), *self.options.cdi_dir.iterdir()]
        return sorted(path.name for path in found)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="dra-") as folder:  # socket paths are short
        made = Node(Path(folder))
        yield made
        made.service.stop()


def test_the_kubelet_learns_the_driver(node: Node) -> None:
    """The kubelet would not find the driver, or speak a version that it does not serve."""
    method = "/pluginregistration.Registration/GetInfo"
    info = call(node.service.registration, method, m.InfoRequest(), m.PluginInfo, 20)
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", "gpu.nvshare.com", str(node.service.endpoint))
    assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_claim_becomes_a_slot_and_a_cdi_file(node: Node, version: str) -> None:
    """A container would run without its limit, its share or the hook."""
    node.add("u1", result("gpu-a"), result("gpu-b", share="b2"), config=(parameters(memoryMode="swap", weight=3),))
    answer = node.call("NodePrepareResources", "u1", version=version)["u1"]
    assert not answer.error
    (slot,) = slots.read_all(node.options.slots_dir).values()
    assert (slot.gpus, slot.limit_bytes) == (("GPU-a", "GPU-b"), 4 << 30)
    assert slot.policy == {"memory_limit": str(4 << 30), "weight": "3", "share_request": "0.3"}
    assert [(each.device_name, each.share_id, list(each.cdi_device_ids)) for each in answer.devices] == [
        ("gpu-a", "a1", [f"nvshare.com/claim={slot.slot}", "nvidia.com/gpu=GPU-a"]),
        ("gpu-b", "b2", ["nvidia.com/gpu=GPU-b"]),
    ]
    document = json.loads((node.options.cdi_dir / "nvshare.com-claim_u1.json").read_text())
    (device,) = document["devices"]
    edits = device["containerEdits"]
    assert (document["kind"], device["name"]) == ("nvshare.com/claim", slot.slot)
    assert {"NVIDIA_VISIBLE_DEVICES=GPU-a,GPU-b", "NVSHARE_MEMORY=swap"} <= set(edits["env"])
    installed = node.options.library_dir / node.version
    assert {mount["containerPath"]: mount["hostPath"] for mount in edits["mounts"]} == {
        "/run/nvshare": str(node.options.slots_dir / slot.slot),
        "/opt/nvshare": str(installed),
        "/etc/ld.so.preload": str(installed / "ld.so.preload"),
    }
    assert not node.call("NodeUnprepareResources", "u1", version=version)["u1"].error
    assert node.files() == []


FIRST = result("gpu-a", "4Gi", "30", "first")
BESIDE = result("gpu-a", "8Gi", "10", "second", "s2")
APART = result("gpu-b", "8Gi", "10", "second", "s2")
SHARED: dict[str, tuple[list[Any], list[list[str]], list[tuple[str, int, str]]]] = {
    "several cards": ([result("gpu-a"), result("gpu-b", share="b2")], [[]], [("GPU-a GPU-b", 4, "0.3")]),
    "a request each": ([FIRST, BESIDE], [["first"], ["second"]], [("GPU-a", 4, "0.3"), ("GPU-a", 8, "0.1")]),
    "one request for two": ([FIRST], [["first"], []], [("GPU-a", 4, "0.3")] * 2),
    "two for one on a card": ([FIRST, BESIDE], [[]], [("GPU-a", 8, "0.1")]),
    "two for one, apart": ([FIRST, APART], [["first", "second"]], [("GPU-b", 8, "0.1")]),
}
"""Row of docs/how-to/dra.md -> results of the claim, the requests that each container names, and what each gets."""


@pytest.mark.parametrize("row", SHARED)
def test_what_containers_that_share_a_claim_get(node: Node, row: str) -> None:
    """Two containers would have more of a card than the scheduler has counted, or another part than the page says."""
    results, containers, expected = SHARED[row]
    node.add("u1", *results)
    for _ in range(2):  # the second pod of a claim may come after a restart of the kubelet
        devices = node.call("NodePrepareResources", "u1")["u1"].devices
    found = [node.slot_in_container(devices, requests) for requests in containers]
    assert [(" ".join(slot.gpus), slot.limit_bytes >> 30, slot.policy["share_request"]) for slot in found] == expected
    counted = {(each["request"], each["consumedCapacity"]["memory"]) for each in results}
    held = slots.read_all(node.options.slots_dir).values()
    assert sorted(slot.limit_bytes >> 30 for slot in held) == sorted(int(size[:-2]) for _, size in counted)


def test_a_failure_is_the_answer_of_its_claim_alone(node: Node) -> None:
    """One wrong claim would keep other pods from starting."""
    node.add("bad", result("gpu-z"))
    node.add("old", result("gpu-a"))
    node.claims["claim-old"]["metadata"]["uid"] = "newer"
    node.add("good", result("gpu-a"))
    answer = node.call("NodePrepareResources", "bad", "old", "good", "../x")
    assert "the node has no device gpu-z" in answer["bad"].error
    assert "another claim has this name" in answer["old"].error
    assert answer["../x"].error
    assert len(answer["good"].devices) == 1
    assert len(slots.read_all(node.options.slots_dir)) == 1


def test_random_operations_leave_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot or file would stay after a restart, a write that fails after the slots, or a call made twice."""
    chance = random.Random(20261128)
    held: set[str] = set()
    write = slots.replace_file

    def fails(path: Path, content: bytes) -> None:
        raise OSError(5, "disk failed", str(path))

    for step in range(400):
        uid = f"u{chance.randrange(12)}"
        node.add(uid, result(chance.choice(["gpu-a", "gpu-b"])) if uid not in held else node_result(node, uid))
        what = chance.choice(["prepare", "prepare", "unprepare", "fail", "restart"])
        if what == "prepare":
            first = node.driver.prepare(uid, node.claims[f"claim-{uid}"])
            assert first == node.driver.prepare(uid, node.claims[f"claim-{uid}"]), step
            held.add(uid)
        elif what == "fail" and uid not in held:
            monkeypatch.setattr(slots, "replace_file", fails)
            with pytest.raises(OSError, match="disk failed"):
                node.driver.prepare(uid, node.claims[f"claim-{uid}"])
            monkeypatch.setattr(slots, "replace_file", write)
            node.driver.unprepare(uid)
        elif what == "unprepare":
            node.driver.unprepare(uid)
            node.driver.unprepare(uid)
            held.discard(uid)
        else:
            node.driver = Driver(node.options, lambda: UUIDS)
        present = slots.read_all(node.options.slots_dir).values()
        assert sorted(slot.allocation for slot in present) == sorted(f"dra-{uid}" for uid in held), step
        assert len(node.files()) == 2 * len(held), step
    for uid in held:
        node.driver.unprepare(uid)
    assert node.files() == []


def node_result(node: Node, uid: str) -> Any:
    """The allocation of a claim does not change while it is held."""
    return node.claims[f"claim-{uid}"]["status"]["allocation"]["devices"]["results"][0]
