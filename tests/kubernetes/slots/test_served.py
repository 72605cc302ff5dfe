"""A real coordinator with slots, and hooks that a test plays by hand: identity, rights, limits, end."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
import zmq

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot
from nvshare.coordinator.protocol import messages
from tests.daemon.made_up_gpus import uuid_of
from tests.daemon.processes import Coordinators, Hook, Running
from tests.waiting import eventually

GIB = 1 << 30


def put(base: Path, name: str, **changes: object) -> Path:
    """A slot of GPU 0; its socket, which the coordinator serves by then."""
    facts = {"allocation": "1", "allocated_at_s": 1.0, "gpus": (uuid_of(0),), "device_ids": (f"{uuid_of(0)}::0",)}
    slots.write(base / "slots", Slot.model_validate({"slot": name, **facts, **changes}))
    path = base / "slots" / name / slots.SOCKET_FILE
    eventually(path.exists, "the slot's socket")
    return path


def test_a_slots_hook_has_its_slots_gpus_limit_and_priority(
    base: Path, running: Running, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Else a pod takes a GPU that it did not get, or sets its own terms; or hooks outside slots stop working."""
    pod = PodRef(namespace="n", name="p", container="c")
    path = put(base, "a", policy={"priority": "-5", "memory_limit": "1GiB"}, pod=pod)
    hook = Hook(context, path).hello(priority=99)
    hook.attach(1)
    refused = hook.next(messages.Rejected)
    assert (refused.code, refused.final, refused.ordinal) == (messages.Rejection.FORBIDDEN_GPU, False, 1)
    assert refused.text == f"no GPU {uuid_of(1)} in slot a; it has {uuid_of(0)}"
    hook.attach(0)
    settings = hook.next(messages.GpuSettings)
    assert (settings.memory_limit_bytes, settings.reserve) == (GIB, True)
    put(base, "a", policy={"priority": "3", "memory_limit": "2GiB"}, pod=pod)
    assert hook.next(messages.GpuSettings).memory_limit_bytes == 2 * GIB
    outside = Hook(context, running.directory.hooks_socket).hello("outside", priority=99)
    outside.attach(1)
    outside.next(messages.GpuSettings)
    status = running.ask(api.Status())
    shown = {client["name"]: (client["group"], client["priority"]) for client in status["clients"]}
    assert shown == {"test": ("a", 3), "outside": ("", 99)}
    (slot,) = status["slots"]
    assert (slot["namespace"], slot["pod"], slot["container"], slot["registered"]) == ("n", "p", "c", True)
    assert slot["refused"] == 1


def test_a_removed_slot_takes_nobody_new_and_harms_nobody(
    base: Path, running: Running, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Else a wrong answer of the kubelet's about pods cuts off a job that runs."""
    path = put(base, "a")
    hook = Hook(context, path).hello()
    hook.attach(0, wanted=True)
    lease = hook.next(messages.Grant).lease_id
    slots.remove(base / "slots", "a")
    eventually(lambda: [slot["removed"] for slot in running.status()["slots"]] == [True], "the slot to go")
    with pytest.raises(OSError, match="No such file"), socket.socket(socket.AF_UNIX) as late:
        late.connect(str(path))
    hook.release(lease, wanted=True)
    assert hook.next(messages.Grant).lease_id > lease


def test_a_slot_made_again_in_another_directory_is_served(
    base: Path, running: Running, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Else a slot that goes and comes within a moment, or a cleaned /run, leaves a pod without a socket for ever."""
    path = put(base, "a")
    for round_number in range(20):
        slots.remove(base / "slots", "a")
        put(base, "a", allocation=str(round_number), policy={"memory_limit": str(GIB + round_number)})
    hooks = [Hook(context, path).hello("again")]
    hooks[0].attach(0)
    assert hooks[0].next(messages.GpuSettings).memory_limit_bytes == GIB + 19
    put(base, "a", allocation="19", policy={"memory_limit": "1GiB"})  # seen only if the new directory is watched
    assert hooks[0].next(messages.GpuSettings).memory_limit_bytes == GIB
    shutil.rmtree(base / "slots", ignore_errors=True)
    eventually(lambda: all(slot["removed"] for slot in running.status()["slots"]), "all slots to go")
    put(base, "b")
    hooks.append(Hook(context, base / "slots" / "b" / slots.SOCKET_FILE).hello("late"))
    hooks[1].next(messages.Welcome)


def test_slots_are_served_where_they_can_be_or_not_at_all(base: Path) -> None:
    """Else the coordinator runs, and no pod ever reaches it; or `nvshare-ctl` on an ordinary machine talks of slots."""
    coordinators = Coordinators(base)
    code, text = coordinators.refused("--slots-dir", str(base / ("d" * 60)))
    assert (code, "--slots-dir: " in text, "at most 107 bytes" in text) == (1, True, True), text
    plain = coordinators.start()
    assert "slots" not in plain.status()
    assert plain.stop() == 0
