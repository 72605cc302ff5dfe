"""Shares of the node's budget of pinned host memory.

Evicted memory lies in pinned host memory, which the whole machine does without.  So hooks ask before they pin more
(`State.asks` of `HOST`).  An *owner* is a user or a Kubernetes slot; all its programs count together.

Rules:
- A question is answered at once: the share is then what was asked for, or what it was before.
- A share grows only within the budget, and only while its owner has at most `host_fair_times` times what is left then.
  With 8, one owner can have 8/9 of the budget, n owners 8/(1 + 8n) each, and a newcomer always finds some.
  (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998.)
- A share is a promise: it is never taken away.  An owner above its bound gets more once it is below.
- Giving back is always allowed.  The share of a client that is gone is free at once.
- What a hook asks for first after it connects is pinned already, so it counts before the rule is asked.  In the time
  after a start (`RECONNECT_NS`) this holds as far as the rule could have led; for a process that lost its connection
  and is back within `RETURN_NS`, up to the share that it had.
- The amount of the first question (`claim_bytes`) can be evicted whatever the share is, because the hook has room for
  it.  Otherwise memory that has no share after a restart would block its GPU for ever.  A claim never grows.
- A budget below what is given takes nothing away; nothing more is given until enough has come back.

Non-goals: what a client uses its share for (residency.py, admission.py).
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.model.client import Client
from nvshare.coordinator.model.commands import Send
from nvshare.coordinator.model.node import HostOwner, Node
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol.messages import HOST, MOST_BYTES, Rejected, Rejection, State, Target
from nvshare.coordinator.units import format_size

RETURN_NS: Final = 5 * SECOND_NS
"""A hook that has lost its connection tries again several times a second."""


# --- is there room on the host? ---------------------------------------------------------------------------------------


def spare_bytes(node: Node, owner: str) -> int:
    """The most that the owner could be given now within the rule."""
    left = node.host_budget_bytes - node.host.shared_bytes
    times = node.settings.host_fair_times
    if times and left > 0:
        record = node.host.owners.get(owner)
        left = (times * left - (record.shared_bytes if record is not None else 0)) // (1 + times)
    return max(0, left)


def most_bytes(node: Node, client: Client) -> int:
    """Host memory that the client may have in all: its share, and the rest that it could be given now."""
    if not client.host.asked:
        return MOST_BYTES  # outside the budget
    return client.host.share_bytes + spare_bytes(node, client.owner)


def room_bytes(node: Node, client: Client) -> int:
    """Host memory that the client may still use, of `most_bytes` or of its claim."""
    used = sum(seat.memory.host_bytes for seat in client.seats.values())
    return max(0, max(most_bytes(node, client), client.host.claim_bytes) - used)


# --- shares -----------------------------------------------------------------------------------------------------------


def ask(node: Node, client: Client, state: State, now_ns: int) -> None:
    """Answers a question for a share of this size in all."""
    if not client.host.asked:
        client.host.asked = True
        client.host.claim_bytes = state.total_bytes
        node.host.owners.setdefault(client.owner, HostOwner()).clients += 1
        _set_share(node, client, min(state.total_bytes, _pinned_bytes(node, client, now_ns)))
    client.host.claim_bytes = min(client.host.claim_bytes, state.total_bytes)
    owner = node.host.owners[client.owner]
    refused = state.total_bytes > max(client.host.share_bytes, most_bytes(node, client))
    if not refused:
        _set_share(node, client, state.total_bytes)
    else:
        owner.refused += 1
        node.host.refused += 1
        _explain_refusal(node, client, owner, state.total_bytes)
    node.out.append(Send(client.client_id, Target(HOST, 0, 0, answers=state.asks, total_bytes=client.host.share_bytes)))
    for seat in client.seats.values():  # the room on the host has changed, and with it what can be evicted
        node.concern(seat.gpu)


def _set_share(node: Node, client: Client, size: int) -> None:
    """Changes the client's share, and the sums."""
    more = size - client.host.share_bytes
    client.host.share_bytes = size
    node.host.owners[client.owner].shared_bytes += more
    node.host.shared_bytes += more


def _pinned_bytes(node: Node, client: Client, now_ns: int) -> int:
    """Upper bound of the part of the client's first question that is pinned already."""
    if now_ns < node.host.reconnected_at_ns:
        budget, times, owners = node.host_budget_bytes, node.settings.host_fair_times, node.host.owners
        own = budget - (budget // (1 + times) if times else 0)  # the most for one owner
        all_own = budget - (budget // (1 + times) ** len(owners) if times else 0)  # and for all owners
        return max(0, min(own - owners[client.owner].shared_bytes, all_own - node.host.shared_bytes))
    size, until_ns = node.host.departed.pop(client.identity.process_id, (0, 0))
    return size if now_ns < until_ns else 0


def _explain_refusal(node: Node, client: Client, owner: HostOwner, size: int) -> None:
    """Tells the operator, and the program's own log.  It comes before the answer, after which the program prints it."""
    left = max(0, node.host_budget_bytes - node.host.shared_bytes)
    fair = size - client.host.share_bytes <= left
    name = client.owner.partition("#")[0]
    node.notify(
        "refused",
        uuid=None,
        client=client.client_id,
        bytes=size,
        why="host share" if fair else "host",
        owner=name,
        owner_bytes=owner.shared_bytes,
        left_bytes=left,
    )
    rule = f"; one may have at most {node.settings.host_fair_times} times what is left" if fair else ""
    text = (
        f"{format_size(size)} of pinned host memory: {name} has {format_size(owner.shared_bytes)}, "
        f"{format_size(left)} of {format_size(node.host_budget_bytes)} are left{rule} (host_budget)"
    )
    node.out.append(Send(client.client_id, Rejected(int(Rejection.OUT_OF_MEMORY), False, text[:250])))


def client_left(node: Node, client: Client, now_ns: int) -> None:
    """The client is gone; its process may come back."""
    if not client.host.asked:
        return
    for process_id in [pid for pid, (_, until_ns) in node.host.departed.items() if until_ns <= now_ns]:
        del node.host.departed[process_id]
    if client.host.share_bytes and len(node.host.departed) < node.settings.max_clients:
        node.host.departed[client.identity.process_id] = (client.host.share_bytes, now_ns + RETURN_NS)
    _set_share(node, client, 0)
    client.host.asked = False
    name = client.owner
    node.host.owners[name].clients -= 1
    if not node.host.owners[name].clients:
        del node.host.owners[name]
