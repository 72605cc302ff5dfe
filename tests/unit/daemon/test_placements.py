"""`nvshare-run --gpu`: the choice of GPUs for a program that is about to start, and their reservation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.gpu_choice import (
    GIVES_WAY_NS,
    STARTING_NS,
    NoPlaceError,
    Tenant,
    choose,
    tenants,
)
from nvshare.coordinator.daemon.control.placements import MOST_RESERVED, Placements
from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.model.placement import MOST_BYTES, Placement, parse_placement
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.devices import Device
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import create
from tests.harness import GPU, Harness, ScriptedClient

ALICE, BOB = 1001, 1002
UUIDS = ("GPU-0", "GPU-1")
GIB = 1 << 30
CARDS = [Device(index, f"GPU-{index}", "card", 80 * GIB) for index in range(4)]


def a_wish(**values: Any) -> api.Place:
    return api.Place(**{"name": "job", **values})


def tenant(gpu: int, name: str = "job", **values: Any) -> Tenant:
    facts: dict[str, Any] = {"job_class": JobClass.BATCH, "demand": 1.0, "memory_bytes": 0}
    return Tenant(f"GPU-{gpu}", name, f"{name} (1)", **{**facts, **values})


def picked(present: list[Tenant], wish: api.Place, cards: list[Device], own: str = "") -> tuple[tuple[str, ...], str]:
    return choose(cards, present, wish, tuple(wish.gpus.split(",")) if wish.gpus else None, own)


def chosen(
    present: list[Tenant], wish: api.Place | None = None, cards: list[Device] | None = None, own: str = ""
) -> list[int]:
    """The indices of the chosen GPUs."""
    return [int(uuid[4:]) for uuid in picked(present, wish or a_wish(), cards or CARDS, own)[0]]


def refusal(present: list[Tenant], wish: api.Place, cards: list[Device] | None = None, own: str = "") -> NoPlaceError:
    with pytest.raises(NoPlaceError) as refused:
        picked(present, wish, cards or CARDS, own)
    return refused.value


def test_programs_that_start_together_spread() -> None:
    """Broken: a batch of starts ends on one GPU while others are free."""
    present: list[Tenant] = []
    for _ in range(8):
        present.append(tenant(chosen(present)[0]))
    assert [each.uuid[4:] for each in present] == list("01230123")


def test_of_idle_gpus_the_one_with_less_memory_in_use_is_chosen() -> None:
    """Broken: a program evicts an idle notebook although another GPU is empty."""
    held = [tenant(0, demand=0, memory_bytes=30 * GIB), tenant(1, demand=0, memory_bytes=10 * GIB)]
    assert chosen(held, cards=CARDS[:2]) == [1]


def test_a_gpu_with_little_work_comes_before_a_busy_one() -> None:
    """Broken: memory alone decides, and a training job starts beside another one."""
    there = [tenant(0, demand=1.0), tenant(1, demand=0.1, memory_bytes=40 * GIB)]
    assert chosen(there, cards=CARDS[:2]) == [1]


def test_memory_that_must_move_at_each_turn_counts_more_than_work() -> None:
    """Broken: two programs that together exceed a GPU swap without end, while another pair would fit."""
    big = a_wish(memory_bytes=60 * GIB)
    there = [tenant(0, demand=0.5, memory_bytes=60 * GIB), tenant(1, demand=1.0, memory_bytes=10 * GIB)]
    assert chosen(there, big, CARDS[:2]) == [1]
    idle = [tenant(0, demand=0.0, memory_bytes=60 * GIB), there[1]]
    assert chosen(idle, big, CARDS[:2]) == [0], "idle memory moves once"


def test_interactive_programs_are_kept_apart() -> None:
    """Broken: two notebooks wait for each other while a training job has a GPU for itself."""
    quick = a_wish(job_class=JobClass.INTERACTIVE)
    there = [tenant(0, job_class=JobClass.INTERACTIVE, demand=0.1), tenant(1, demand=1.0)]
    assert chosen(there, quick, CARDS[:2]) == [1]
    assert chosen(there, cards=CARDS[:2]) == [0]


def test_best_effort_goes_where_time_is_left_and_is_in_nobodys_way() -> None:
    """Broken: leftovers are looked for where there are none, or a batch job flees from a program that yields."""
    yields: dict[str, Any] = {"job_class": JobClass.BEST_EFFORT}
    there = [tenant(0, demand=1.0), tenant(1, demand=0.4)]
    assert chosen(there, a_wish(job_class=JobClass.BEST_EFFORT), CARDS[:2]) == [1]
    left = [tenant(0, demand=1.0, **yields), tenant(1, demand=0.2)]
    assert chosen(left, cards=CARDS[:2]) == [0]
    assert chosen(left, a_wish(job_class=JobClass.BEST_EFFORT), CARDS[:2]) == [1]


def test_with_and_apart() -> None:
    """Broken: programs that share data are separated, or rivals are put together."""
    there = [tenant(2, "server")]
    assert chosen(there, a_wish(beside="server")) == [2]
    assert 2 not in chosen(there, a_wish(count=3, apart="server"))
    everywhere = [tenant(index, "server") for index in range(4)]
    refused = refusal(everywhere, a_wish(apart="server"))
    assert refused.later
    assert "GPU 3: server (1) is there" in str(refused)


def test_the_first_of_a_group_needs_no_fellow() -> None:
    """Broken: `--name a --with a` can never start, or its second program goes elsewhere."""
    group = a_wish(name="a", beside="a")
    assert chosen([tenant(0)], group) == [1]
    assert chosen([tenant(3, "a")], group) == [3]
    assert "there is no program named b" in str(refusal([tenant(0)], a_wish(name="a", beside="b")))


def test_apart_also_holds_for_those_who_come_later() -> None:
    """Broken: a program that wanted to be apart from `loader` gets it as a neighbour a minute later."""
    shy = tenant(0, placement=Placement("1", placed_apart="loader"))
    assert chosen([shy, tenant(1), tenant(1)], a_wish(name="loader"), CARDS[:2]) == [1]
    assert chosen([shy, tenant(1), tenant(1)], a_wish(name="other"), CARDS[:2]) == [0]
    assert refusal([shy], a_wish(name="loader"), CARDS[:1]).later


def test_alone() -> None:
    """Broken: a benchmark that must be alone gets company, at once or later."""
    wish = a_wish(alone=True)
    assert chosen([tenant(0, demand=0), tenant(1)], wish) == [2]
    assert refusal([tenant(index) for index in range(4)], wish).later
    lonely = tenant(0, "bench", demand=0, placement=Placement("1", placed_alone=True))
    others = [tenant(index) for index in (1, 1, 2, 2, 3, 3)]
    assert chosen([lonely, *others]) == [1]
    assert "bench (1) is alone there" in str(refusal([lonely], a_wish(), CARDS[:1]))


def test_processes_of_one_program_do_not_count_against_each_other() -> None:
    """Broken: a launcher inside of a program that is alone finds no GPU."""
    own = tenant(0, placement=Placement("1", placed_alone=True))
    assert chosen([own], a_wish(alone=True), CARDS[:1], "1") == [0]
    assert refusal([own], a_wish(), CARDS[:1], "2")


def test_named_gpus_are_used_as_named() -> None:
    """Broken: a user's own choice is reordered, refused for another's wish, or breaks one's own without a word."""
    lonely = tenant(1, "bench", placement=Placement("1", placed_alone=True))
    assert picked([lonely], a_wish(gpus="GPU-3,GPU-1"), CARDS) == (("GPU-3", "GPU-1"), "named by --gpu")
    assert "GPU 1: bench (1) is there" in str(refusal([lonely], a_wish(gpus="GPU-3,GPU-1", alone=True)))


def test_memory_that_cannot_fit_is_refused() -> None:
    """Broken: a program is sent to a GPU on which it can never allocate what it needs."""
    mixed = [Device(0, "GPU-0", "small", 24 * GIB), Device(1, "GPU-1", "large", 80 * GIB)]
    assert chosen([tenant(1), tenant(1)], a_wish(memory_bytes=40 * GIB), mixed) == [1]
    refused = refusal([], a_wish(memory_bytes=100 * GIB), mixed)
    assert "GPU 0: it has 24GiB, and 100GiB are wanted" in str(refused)
    assert not refused.later
    pinned = [tenant(1, immovable_bytes=50 * GIB)]
    refused = refusal(pinned, a_wish(memory_bytes=40 * GIB), mixed)
    assert "GPU 1: it has room for 30GiB beside memory that cannot move" in str(refused)
    assert refused.later


def test_several_gpus_are_those_that_nvlink_joins() -> None:
    """Broken: the two halves of a model talk over PCIe although their neighbours would have had NVLink."""
    pairs = {0: 2, 2: 0, 1: 3, 3: 1}
    cards = [
        replace(card, distances={f"GPU-{other}": 0 if pairs[card.index] == other else 40 for other in range(4)})
        for card in CARDS
    ]
    assert chosen([], a_wish(count=2), cards) == [0, 2]
    assert chosen([tenant(0, demand=0.2)], a_wish(count=2), cards) == [1, 3]
    assert chosen([tenant(0), tenant(1)], a_wish(count=2), cards) == [2, 3], "NVLink is no reason to take a busy GPU"
    assert "joined by NVLink" in picked([], a_wish(count=2), cards)[1]


def test_mig_instances_are_not_joined() -> None:
    """Broken: a program gets two MIG instances, of which CUDA shows it one."""
    cards = [replace(CARDS[0], is_mig=True), replace(CARDS[1], is_mig=True), CARDS[2]]
    assert chosen([tenant(2)], a_wish(), cards) == [0]
    assert "MIG" in str(refusal([], a_wish(count=2), cards))
    assert chosen([], a_wish(gpus="GPU-1,GPU-0"), cards) == [1, 0]


def test_the_choice_of_many_among_many_ends_soon() -> None:
    """Broken: all subsets of 32 GPUs are looked at, and the coordinator stands still."""
    cards = [Device(index, f"GPU-{index}", "card", GIB) for index in range(32)]
    assert chosen([], a_wish(count=16), cards) == list(range(16))
    assert chosen([tenant(index) for index in range(4)], a_wish(count=5), cards) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("among", "count"), [((), 1), (("GPU-1",), 2), (None, 5)])
def test_more_gpus_than_there_are(among: tuple[str, ...] | None, count: int) -> None:
    """Broken: a program starts on fewer GPUs than it asked for."""
    with pytest.raises(NoPlaceError) as refused:
        choose(CARDS, [], a_wish(count=count), among)
    assert not refused.value.later


def test_a_choice_says_why() -> None:
    """Broken: `explain` cannot say why a program is where it is."""
    why = picked([tenant(0, memory_bytes=20 * GIB)], a_wish(alone=True), CARDS[:2])[1]
    assert why == "alone, cheapest: GPU 1 (0.00: busy 0%, memory 0%); GPU 0: job (1) is there"


def test_the_engines_programs_as_tenants() -> None:
    """Broken: a program that has just come counts as idle, a paused one as busy, or a hidden one by its name."""
    node = Harness(create)
    node.gpu(capacity=8 * GIB)
    text = Placement("7", placed_alone=True, placed_why="because").text()
    fresh = node.client("fresh", placement=text)
    (one,) = tenants(node.scheduler.snapshot(node.clock.now_ns), lambda _: True, 0)
    assert (one.uuid, one.name, one.demand, one.placement) == (GPU, "fresh", 1.0, parse_placement(text))
    node.advance(STARTING_NS)
    (one,) = tenants(node.scheduler.snapshot(node.clock.now_ns), lambda _: False, 0)
    assert (one.name, one.who, one.demand) == ("", "a program of user 0", 0.0)
    fresh.request()
    node.advance(30_000_000_000)
    (one,) = tenants(node.scheduler.snapshot(node.clock.now_ns), lambda _: True, 0)
    assert 0.4 < one.demand < 0.6


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1", '["a"]', "[1,false,1,1]", '["",false,"",""]', "[" * 255, '{"a":1,"b":2,"c":3,"d":4}'),
        *('["' + "1" * 230 + '",false,"",""]', '["\\ud800",true,"",""]'),
    ],
)
def test_a_client_that_tells_nonsense_was_not_placed(text: str) -> None:
    """Broken: a client's environment ends its connection, or the coordinator."""
    assert parse_placement(text) == Placement()


def test_a_placement_fits_its_message() -> None:
    """Broken: the hook ignores a placement with a long reason or name, and `--alone` ends with the first CUDA call."""
    for why, apart in (("x" * 3000, "n" * 63), ("é" * 500, '"' * 63), ("", "😀" * 15)):
        placement = Placement("12345678", True, apart, why)
        text = placement.text()
        assert len(text.encode()) <= MOST_BYTES
        read = parse_placement(text)
        assert replace(read, placed_why="") == replace(placement, placed_why="")
        assert why.startswith(read.placed_why)


# --- reservations ----------------------------------------------------------------------------------------------------


class Server:
    """A coordinator of two GPUs.  Callers of other PID namespaces unless a test names a process."""

    def __init__(self) -> None:
        self.node = Harness(create)
        for uuid in UUIDS:
            self.node.gpu(uuid, capacity=8 << 30)
        self.devices = [Device(index, uuid, "card", 8 << 30) for index, uuid in enumerate(UUIDS)]
        self.rights = Rights(own_user=900)
        self.placements = Placements(self.devices, self.rights)

    def place(self, user: int = ALICE, process_id: int = 0, **wish: Any) -> dict[str, Any]:
        request = a_wish(**wish)
        snapshot = self.node.scheduler.snapshot(self.node.clock.now_ns)
        return self.placements.place(request, Peer(process_id, user), snapshot, lambda name: name)

    def refusal(self, user: int = ALICE, process_id: int = 0, **wish: Any) -> api.ControlError:
        with pytest.raises(api.ControlError) as refused:
            self.place(user, process_id, **wish)
        return refused.value

    def starts(self, placed: dict[str, Any], user: int = ALICE) -> ScriptedClient:
        """The placed program makes its first CUDA call."""
        client = self.node.client("job", attach=False, user_id=user, placement=placed["placement"])
        client.attach(placed["uuids"][0])
        return client


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def process() -> Iterator[int]:
    """A process that lives as long as the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running.pid
        running.kill()


def test_a_reservation_ends_when_the_program_uses_its_gpu(server: Server) -> None:
    """Broken: a program counts twice, and its GPU looks busier than it is."""
    placed = server.place()
    assert placed["uuids"] == ["GPU-0"]
    client = server.starts(placed)
    assert "GPU 0 (1.00: busy 100%" in server.place()["why"]
    server.node.advance(STARTING_NS)
    assert "GPU 0 (0.00: busy 0%" in server.place()["why"], "it has not used the GPU for two minutes"
    client.die()
    assert server.place(gpus="GPU-0", alone=True)


def test_a_reservation_of_an_unknown_process_ends_with_time(server: Server) -> None:
    """Broken: starts in containers, whose process ids nobody knows, keep GPUs for ever."""
    placed = server.place(alone=True, gpus="GPU-0,GPU-1")
    assert "is alone there" in server.refusal().text
    assert server.refusal().code == "no_place"
    server.node.advance(STARTING_NS)
    assert server.place()["uuids"] == ["GPU-0"]
    server.starts(placed)
    assert server.place()["uuids"] == ["GPU-1"], "from its first call on the program says it itself"


def test_alone_lasts_as_long_as_the_process(server: Server, process: int) -> None:
    """Broken: a shell that is alone gets company after two minutes; or a program that is not counts for ever."""
    server.place(process_id=process, alone=True, gpus="GPU-0")
    server.place(process_id=os.getpid(), gpus="GPU-1")
    server.node.advance(STARTING_NS)
    assert server.place()["why"].startswith("cheapest: GPU 1 (0.00")
    os.kill(process, 9)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # a zombie counts as ended
    assert server.place(process_id=os.getpid())["uuids"] == ["GPU-0"]


def test_a_placement_without_work_gives_way_to_other_users(server: Server, process: int) -> None:
    """Broken: one user's `--alone -- sleep inf` on each GPU refuses everybody else for ever."""
    placed = server.place(process_id=process, alone=True, gpus="GPU-0,GPU-1")
    assert "is alone there" in server.refusal(BOB).text
    server.node.advance(GIVES_WAY_NS)
    assert server.place(BOB)["uuids"] == ["GPU-0"]
    assert "is alone there" in server.refusal(ALICE).text, "its own user's next program waits for it"
    client = server.starts(placed)
    assert "is alone there" in server.refusal(BOB, visible="GPU-0").text, "it comes to use one now"
    server.node.advance(GIVES_WAY_NS)
    assert server.place(BOB, visible="GPU-0"), "it has done nothing for a minute"
    client.request()
    client.say(messages.Progress(0, client.seat().lease_id, server.node.clock.now_ns, 1, 0, 0, 0))
    assert "is alone there" in server.refusal(BOB, visible="GPU-0").text


def test_a_process_has_one_reservation(server: Server) -> None:
    """Broken: a launcher that asks again, as with --wait, fills the node by itself."""
    for _ in range(3):
        assert server.place(process_id=os.getpid(), alone=True)["uuids"] == ["GPU-0"]


def test_the_reservations_of_a_user_are_bounded(server: Server) -> None:
    """Broken: one user makes the coordinator grow and slow without end."""
    for _ in range(MOST_RESERVED):
        server.place()
    assert server.refusal().code == "busy"
    assert server.place(BOB)
    server.node.advance(STARTING_NS)
    assert server.place()


def test_names_of_other_users_are_hidden_and_count(server: Server) -> None:
    """Broken: a user learns what others run, by a refusal or by guessing; or hiding switches wishes off."""
    server.rights.hide_other_users = True
    server.starts(server.place(BOB, name="secret", alone=True, gpus="GPU-0"), BOB)
    server.place(BOB, name="secret", apart="job", gpus="GPU-1")
    text = server.refusal(ALICE).text
    assert "secret" not in text
    assert f"GPU 0: a program of user {BOB} is alone there" in text
    assert f"GPU 1: a program of user {BOB} is apart from job" in text
    assert server.place(ALICE, name="other", apart="secret")["uuids"] == ["GPU-1"]
    assert "there is no program named secret" in server.refusal(ALICE, beside="secret").text
    for seer in (BOB, 0):
        assert "secret (0) is apart from job" in server.refusal(seer).text


def test_processes_below_a_placed_program_inherit_its_wishes(server: Server) -> None:
    """Broken: `--alone` ends where a script places its own programs, or a wish of theirs excludes their script."""
    outer = server.place(alone=True, apart="rival")
    inner = server.place(within=outer["placement"], visible=",".join(outer["uuids"]))
    assert inner["uuids"] == outer["uuids"]
    one, other = (parse_placement(each["placement"]) for each in (outer, inner))
    assert (one.placement, one.placed_alone, one.placed_apart) == (other.placement, True, "rival")
    assert replace(one, placed_why="") == replace(other, placed_why="")
    assert server.place(within="nonsense")["uuids"] == ["GPU-1"]


def test_visible_devices_are_read_as_cuda_reads_them(server: Server) -> None:
    """Broken: a program runs on a GPU that its user did not allow."""
    for visible, found in (("1", "GPU-1"), ("gpu-1", "GPU-1"), (" 1 ,0", "GPU-0"), ("GPU-1,nonsense,GPU-0", "GPU-1")):
        assert server.place(process_id=os.getpid(), visible=visible)["uuids"] == [found], visible
    assert server.refusal(visible="NoDevFiles").code == "gpu"
    mixed = [server.devices[0], replace(server.devices[1], name="another card")]
    server.placements = Placements(mixed, server.rights)
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID too" in server.refusal(visible="1").text
    assert server.place(visible="1", fastest_first=False)["uuids"] == ["GPU-1"]
    assert server.place(visible="GPU-0")["uuids"] == ["GPU-0"]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"count": 0}, {"count": 33}, {"name": "a\nb"}, {"job_class": 3}, {"memory_bytes": -1}),
        *({"apart": "n" * 64}, {"apart": "😀" * 16}, {"beside": "a\u202eb"}),
    ],
)
def test_requests_out_of_bounds_are_refused(wrong: dict[str, Any]) -> None:
    """Broken: a client's nonsense reaches the choice, the log or another user's terminal."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        a_wish(**wrong)
