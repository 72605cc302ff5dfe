"""Each user's rights on the control socket, with made-up peers: who sees which names, and who changes which program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.live_settings import LiveSettings
from nvshare.coordinator.daemon.control.read_budget import ALL_PART, MOST_NS, USER_PART, ReadBudget
from nvshare.coordinator.daemon.control.rights import HIDDEN, Rights
from nvshare.coordinator.daemon.control.server import Administration
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import events
from nvshare.coordinator.model.placement import Placement
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.system.devices import Device
from nvshare.scheduler_policies import registry

GPU = "GPU-00000000-0000-0000-0000-000000000000"
SERVICE, ALICE, BOB = 900, 1001, 1002


class Node:
    """A coordinator of user SERVICE, with a program of ALICE (client 1) and one of BOB (client 2)."""

    def __init__(self, path: Path, processes: list[int], rights: Rights) -> None:
        scheduler = self.scheduler = Scheduler(registry.create)
        live = LiveSettings(path)
        self.outbox = _Nowhere()
        self.dispatcher = Dispatcher(scheduler, self.outbox, _Nowhere(), rights, max_clients=9, live=live)
        device = Device(uuid=GPU, index=0, name="card", total_bytes=8 << 30)
        scheduler.handle(events.GpuAdded(GPU, "card", 8 << 30, 8 << 30), 1)
        for number, (user, name) in enumerate(((ALICE, "train"), (BOB, "secret")), start=1):
            placement = Placement("1f", placed_why=f"apart from {name}").text()
            peer = Peer(processes[number - 1], user)
            self.greet(number, peer, name, profile=f"gang={name}-gang", placement=placement)
            attach = messages.AttachGpu(0, GPU, 0, True, 0, 0, 0)
            self.dispatcher.frame(number, messages.encode(attach), 3)
        self._administration = Administration(self.dispatcher, [device], registry.create, {}, live, dict, list, rights)

    def greet(self, number: int, peer: Peer, name: str, **more: str) -> None:
        """A program comes."""
        self.outbox.peers[number] = peer
        hello = messages.Hello(messages.PROTOCOL_VERSION, name, "python", MemoryMode.SWAP, 0, **more)  # type: ignore[arg-type]
        self.dispatcher.frame(number, messages.encode(hello), 2)

    def ask(self, user: int, request: api.Request) -> Any:
        return api.decode_reply(self._administration.answer(api.encode_request(request), user, 5))

    def refusal(self, user: int, request: api.Request) -> str:
        with pytest.raises(api.ControlError) as refused:
            self.ask(user, request)
        assert refused.value.code == "permission"
        return refused.value.text

    def client(self, number: int) -> Any:
        return next(c for c in self.ask(0, api.Status())["clients"] if c["client"] == number)


class _Nowhere:
    """An outbox and a journal without an effect, with the peers of its connections."""

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}

    def peer(self, connection: int) -> Peer:
        return self.peers[connection]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.fixture
def rights() -> Rights:
    """A new coordinator's; tests change them."""
    return Rights(own_user=SERVICE, max_priority=5, max_weight=50, hide_other_users=False)


@pytest.fixture
def node(tmp_path: Path, rights: Rights) -> Iterator[Node]:
    """Two programs with processes of their own: live settings belong to processes."""
    running = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        yield Node(tmp_path / "live", [each.pid for each in running], rights)
    finally:
        for each in running:
            each.kill()
            each.communicate()


def test_everybody_sees_everything_by_default(node: Node) -> None:
    """Broken: a user of a shared server cannot see who has the GPU."""
    status = node.ask(BOB, api.Status())
    assert status == node.ask(0, api.Status())
    assert [client["name"] for client in status["clients"]] == ["train", "secret"]
    assert node.ask(BOB, api.Ping())["clients"] == 2


@pytest.mark.parametrize(
    "request_",
    [
        api.Set(setting="quantum", value=1_000_000),
        api.Set(setting="policy", value="round_robin"),
        api.Set(setting="sharing", value="auto"),
        api.Set(setting="switch_share", value=0.1),
        api.Set(setting="host_budget", value=1),
        api.Unset(),
        api.Unset(setting="quantum"),
        api.Unset(setting="limit"),
    ],
)
def test_only_operators_change_the_node(node: Node, request_: api.Request) -> None:
    """Broken: any user changes how all programs share the GPUs."""
    said = node.refusal(ALICE, request_)
    assert f"only root or user {SERVICE} may" in said
    assert "your own programs" in said


def test_the_coordinators_user_is_an_operator(node: Node) -> None:
    """Broken: one's own coordinator obeys root alone."""
    assert node.ask(SERVICE, api.Set(setting="quantum", value=1_000_000))["quantum_ns"] == 1_000_000
    assert node.ask(SERVICE, api.Pause(client="secret"))["paused"]


@pytest.mark.parametrize(
    "change",
    [
        lambda client: api.Pause(client=client),
        lambda client: api.Resume(client=client),
        lambda client: api.Set(setting="priority", client=client, value=-5),
        lambda client: api.Set(setting="weight", client=client, value=2),
        lambda client: api.Set(setting="class", client=client, value="best_effort"),
        lambda client: api.Set(setting="limit", client=client, value=1 << 30),
        lambda client: api.SetShare(client=client, limit=0.5),
    ],
)
def test_users_change_their_own_programs_alone(node: Node, change: Any) -> None:
    """Broken: a user needs root for one's own program, or can stop another user's."""
    assert node.ask(ALICE, change("train"))["client"] == 1
    said = node.refusal(ALICE, change("secret"))
    assert f"belongs to user {BOB}; only user {BOB} or root or user {SERVICE} may change it" in said
    assert not node.client(2)["paused"]


def test_a_rank_has_its_bounds(node: Node) -> None:
    """Broken: `set priority` gives what --priority does not."""
    assert node.ask(ALICE, api.Set(setting="priority", client="c1", value=5))["priority"] == 5
    assert "at most 5" in node.refusal(ALICE, api.Set(setting="priority", client="c1", value=6))
    assert "at most 50" in node.refusal(ALICE, api.Set(setting="weight", client="c1", value=51))
    assert node.client(1)["priority"] == 5
    assert "guaranteed share" in node.refusal(ALICE, api.SetShare(client="c1", request=0.5))
    node.ask(0, api.Set(setting="priority", client="c1", value=-1))
    assert "at most -1" in node.refusal(ALICE, api.Set(setting="priority", client="c1", value=0))
    assert node.ask(ALICE, api.Set(setting="priority", client="c1", value=-2))["priority"] == -2


def test_operators_alone_move_programs_between_gpus(node: Node) -> None:
    """Broken: a user crowds the GPU of others, or learns nothing of a refused move."""
    assert "another GPU" in node.refusal(ALICE, api.MigrateClient(client="train", gpu="0"))
    reply = node.ask(SERVICE, api.MigrateClient(client="train", gpu="0"))
    assert (reply["moves_to"], reply["gpus"]) == ("", [GPU])
    assert reply["why"]


def test_an_operators_limit_is_a_ceiling(node: Node, tmp_path: Path) -> None:
    """Broken: a user raises what root has lowered, at once, in two steps, or after a restart."""
    node.ask(0, api.Set(setting="limit", client="c1", value=4 << 30))
    for above in (5 << 30, 0):
        assert f"at most {4 << 30}" in node.refusal(ALICE, api.Set(setting="limit", client="c1", value=above))
    node.ask(ALICE, api.Set(setting="limit", client="c1", value=1 << 30))
    (kept,) = LiveSettings(tmp_path / "live").all()
    assert (kept.value, kept.operators) == (1 << 30, 4 << 30)
    assert "at most" in node.refusal(ALICE, api.Set(setting="limit", client="c1", value=5 << 30, gpu="0"))
    assert node.client(1)["limit_bytes"] == 1 << 30
    node.ask(ALICE, api.Unset(setting="limit", client="c1"))
    assert node.client(1)["limit_bytes"] == 4 << 30, "the operator's is left"
    with pytest.raises(api.ControlError, match="no such live setting"):
        node.ask(ALICE, api.Unset(setting="limit", client="c1"))
    node.ask(0, api.Unset(setting="limit", client="c1"))
    assert node.ask(ALICE, api.Set(setting="limit", client="c1", value=5 << 30))["limit_bytes"] == 5 << 30


def test_an_operators_pause_and_class_stay(node: Node) -> None:
    """Broken: a user resumes a program that root has paused."""
    node.ask(ALICE, api.Pause(client="c1"))
    node.ask(ALICE, api.Resume(client="c1"))
    node.ask(0, api.Pause(client="c1"))
    assert "an operator has paused" in node.refusal(ALICE, api.Resume(client="c1"))
    with pytest.raises(api.ControlError, match="no such live setting"):
        node.ask(ALICE, api.Unset(client="c1"))
    assert node.client(1)["paused"]
    node.ask(0, api.Set(setting="class", client="c1", value="best_effort"))
    assert "class best_effort" in node.refusal(ALICE, api.Set(setting="class", client="c1", value="interactive"))
    node.ask(0, api.Resume(client="c1"))
    assert not node.client(1)["paused"]


def test_names_of_others_are_hidden_where_the_setting_says_so(node: Node, rights: Rights) -> None:
    """Broken: under `hide_other_users` a user reads what other users run, in a table, a reason or a refusal."""
    node.ask(0, api.Pause(client="c2"))
    node.ask(0, api.Pause(client="c1"))
    rights.set_bounds(5, 50, hide=True)
    status = node.ask(ALICE, api.Status())
    own, other = status["clients"]
    assert (own["name"], own["gang"]) == ("train", f"user:{ALICE}/train-gang")
    assert (other["name"], other["program"], other["process_id"], other["gang"]) == (HIDDEN, HIDDEN, 0, HIDDEN)
    assert other["user_id"] == BOB, "whom to talk to"
    assert (own["placed_why"], other["placed_why"]) == ("apart from train", HIDDEN)
    assert [live["process_id"] for live in status["live"]] == [own["process_id"]]
    assert {gang["name"] for gang in status["gangs"]} == {HIDDEN, f"user:{ALICE}/train-gang"}
    assert "secret" not in str(status)
    assert "secret" not in str(node.ask(ALICE, api.Status(clients=False)))
    with pytest.raises(api.ControlError, match="no client 'secret'"):
        node.ask(ALICE, api.Pause(client="secret"))
    assert "secret" not in node.refusal(ALICE, api.Pause(client="c2"))
    assert "secret" in str(node.ask(0, api.Status()))
    assert rights.hidden_event("plan", {"uuid": GPU, "why": "secret is alone"}) == {"uuid": GPU}
    assert rights.hidden_event("registered", {"client": 2, "name": "secret", "process": 7}) == {"client": 2}


def test_readers_take_a_small_part_of_the_time(rights: Rights) -> None:
    """Broken: a loop of `nvshare-ctl status` by any user slows the leases of all."""
    budget = ReadBudget(rights)
    assert budget.refusal(ALICE, 0) is None
    budget.charge(ALICE, MOST_NS + 1_000)
    refused = budget.refusal(ALICE, 0)
    assert refused is not None
    assert (refused.code, f"user {ALICE}" in refused.text) == ("busy", True)
    assert budget.refusal(SERVICE, 0) is None, "operators have no bound"
    assert budget.refusal(ALICE, 1_001 * USER_PART) is None
    now_ns = 10 * MOST_NS * USER_PART
    for user in range(2_000, 2_400):
        if budget.refusal(user, now_ns) is None:
            budget.charge(user, MOST_NS // 2)
    refused = budget.refusal(ALICE, now_ns)
    assert refused is not None
    assert "all users" in refused.text
    assert budget.refusal(ALICE, now_ns + MOST_NS * ALL_PART) is None


def test_an_id_is_no_process_id(node: Node) -> None:
    """Broken: what is meant for a process changes another user's client that has this number, or this name."""
    own, other = node.ask(0, api.Status())["clients"]
    assert node.ask(0, api.Pause(client=str(own["process_id"])))["client"] == own["client"]
    assert node.ask(0, api.Pause(client=f"c{other['client']}"))["client"] == other["client"]
    ended = 1 << 23
    for name in (str(own["client"]), str(ended), "c99"):
        for number, called in enumerate((str(ended), "c99"), 3):
            node.greet(number, Peer(70 + number, BOB), called)
        with pytest.raises(api.ControlError, match="no client"):
            node.ask(0, api.Pause(client=name))
        for number in (3, 4):
            node.dispatcher.gone(number, 6)
