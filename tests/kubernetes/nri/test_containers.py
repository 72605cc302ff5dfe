"""Pods that KAI has placed on a part of a GPU, in containers of a real containerd with runc."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import grpc
import pytest

from tests.kubernetes.cluster.api_server import ApiServer
from tests.kubernetes.containerd.runtime import RUNNING
from tests.kubernetes.nri.worker import FOREVER, Worker
from tests.waiting import eventually

BUSY = ("1000", "10000000", "4")
"""Seconds, duration of a kernel in ns, kernels in flight."""


def test_two_pods_share_by_their_portions(worker: Worker, saturate: Path) -> None:
    """Broken: what KAI promised is not held: the time of each pod, its memory limit, or its name in `slots`."""
    for name, portion, limit in (("small", "0.3", "2048m"), ("large", "0.7", "4096m")):
        annotations = {"nvshare.com/class": "interactive"} if name == "small" else {}
        pod = worker.pod(name, annotations)
        container = worker.start(
            pod, [str(saturate), *BUSY], GPU_PORTION=portion, CUDA_DEVICE_MEMORY_LIMIT=limit, NVSHARE_SOCKET="/none"
        )
        where = f"{name}/main"
        eventually(lambda where=where: worker.slots()[where]["registered"], worker.containerd.output(container))  # type: ignore[misc]
    slots = worker.slots()
    assert {name: slot["limit_bytes"] for name, slot in slots.items()} == {"small/main": 2 << 30, "large/main": 4 << 30}
    assert {name: slot["share_request"] for name, slot in slots.items()} == {"small/main": 0.3, "large/main": 0.7}
    assert {slot["share_limit"] for slot in slots.values()} == {None}
    assert slots["small/main"]["class"] == "interactive"
    shown = worker.table("slots")
    assert "default/small/main" in shown
    assert "default/large/main" in shown
    worker.await_shares(0.3, 0.7)
    slots = worker.slots()
    assert slots["small/main"]["used_ns"] < slots["large/main"]["used_ns"]


def test_a_slot_lives_as_long_as_its_container(worker: Worker) -> None:
    """Broken: a restarted container loses its slot to the end of the one before, or slots are left behind."""
    pod = worker.pod("one")
    first = worker.start(pod, FOREVER)
    ((name, before),) = worker.slot_files().items()
    assert name == "uid-one-main"
    worker.containerd.call("StopContainer", container_id=first, timeout=0)
    eventually(lambda: not worker.slot_files(), "its end")
    worker.start(pod, FOREVER)
    worker.containerd.call("RemoveContainer", container_id=first)
    ((again, after),) = worker.slot_files().items()
    assert again == name
    assert after.allocation != before.allocation
    init = worker.start(pod, ["/busybox", "true"], "init", GPU_PORTION="0.1")
    assert worker.containerd.finish(init)[0] == 0
    eventually(lambda: worker.slot_files().keys() == {name}, "the init container's slot ends with it")


def test_what_a_container_gets(worker: Worker) -> None:
    """Broken: a container's own variables win over its slot's, it may write to what others load, or a container
    without a promise is changed."""
    pod = worker.pod("gets")
    script = "exec 2>&1; echo $NVSHARE_SOCKET; cat /etc/ld.so.preload; touch /opt/nvshare/x /run/nvshare/x"
    command = ["/bin/sh", "-c", script]
    made = worker.start(pod, command, NVSHARE_SOCKET="/mine")
    said = worker.containerd.finish(made)[1]
    assert "/run/nvshare/hooks.sock\n/opt/nvshare/lib/libnvshare_hook.so\n" in said
    assert said.count("Read-only file system") == 2
    worker.start(pod, FOREVER, "two-gpus", NVIDIA_VISIBLE_DEVICES=",".join(worker.uuids()))
    eventually(lambda: "gets/two-gpus" in worker.slots(), "its slot")
    assert worker.slots()["gets/two-gpus"]["gpus"] == worker.uuids()
    whole = worker.start(pod, ["/bin/sh", "-c", "ls /etc/ld.so.preload || env"], "whole", GPU_PORTION="")
    assert "NVSHARE_SOCKET" not in worker.containerd.finish(whole)[1]


def test_a_promise_that_cannot_be_held_stops_the_container(worker: Worker) -> None:
    """Broken: a container with a wrong limit runs without one, or nobody is told why it does not run."""
    pod = worker.pod("wrong", {"nvshare.com/memory-limit": "lots"})
    with pytest.raises(grpc.RpcError, match=r'annotations\[nvshare.com/memory-limit\]: "lots" is not allowed'):
        worker.start(pod, FOREVER)
    with pytest.raises(grpc.RpcError, match="GPU_PORTION: '30' is not a part of a GPU"):
        worker.start(worker.pod("portion"), FOREVER, GPU_PORTION="30")
    assert not worker.slot_files()
    worker.start(worker.pod("right"), FOREVER)


def test_containers_that_start_without_the_plugin_are_named(worker: Worker, tmp_path: Path) -> None:
    """Broken: a plugin that is dead or late keeps containers from starting, or nobody learns that they have no hook."""
    worker.start(worker.pod("before"), FOREVER)
    kept = worker.slot_files()
    worker.stop_plugin()
    dead = worker.start(worker.pod("dead"), FOREVER)
    assert worker.containerd.state(dead) == RUNNING
    server = ApiServer(tmp_path)
    worker.cluster = server.environment()
    worker.start_plugin()
    eventually(lambda: "dead/main" in worker.slots(), "the container is named")
    assert worker.slots()["dead/main"]["hook_missing"] == "it started while nvshare-nri was away"
    assert kept.items() <= worker.slot_files().items()

    assert worker.plugin is not None
    connections = worker.log("nri").count("connected to")
    worker.plugin.send_signal(signal.SIGSTOP)
    late = worker.start(worker.pod("late"), FOREVER)  # containerd waits two seconds for the plugin
    assert worker.containerd.state(late) == RUNNING
    worker.plugin.send_signal(signal.SIGCONT)
    worker.await_connection(connections + 1)
    eventually(lambda: worker.slots().get("late/main", {}).get("hook_missing"), "the container is named")

    assert re.search(r"default/dead/main .* missing", worker.table("slots"))
    assert "default/late/main runs without the hook, out of turn: it started" in worker.table("doctor")
    eventually(lambda: len(server.state.created) == 2, "an event for each")
    assert [event["involvedObject"]["uid"] for event in server.state.created.values()] == ["uid-dead", "uid-late"]
    server.close()
    worker.containerd.remove(dead)
    eventually(lambda: "dead/main" not in worker.slots(), "its slot ends with it")


def test_containerd_restarts(worker: Worker) -> None:
    """Broken: after a restart of containerd new containers have no hook, or those that run lose their slots."""
    pod = worker.pod("stays")
    container = worker.start(pod, FOREVER)
    kept = worker.slot_files()
    for number in (signal.SIGTERM, signal.SIGKILL):
        connections = worker.log("nri").count("connected to")
        worker.containerd.stop(number)
        worker.containerd.start()
        worker.await_connection(connections + 1)
        assert worker.slot_files() == kept
    worker.start(worker.pod("new"), FOREVER)
    eventually(lambda: "new/main" in worker.slots(), "a slot")
    assert worker.slots()["new/main"]["hook_missing"] == ""
    worker.stop_plugin()
    worker.containerd.remove(container)
    worker.start_plugin()
    eventually(lambda: worker.slots().keys() == {"new/main"}, "the slot of a container that ended meanwhile")
    assert worker.stop_plugin(signal.SIGTERM) == 0
