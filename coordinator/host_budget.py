"""Shares of the node's budget of pinned host memory.

What leaves a GPU lies in pinned host memory, which the whole machine has to do without.  So hooks ask before they pin
more (`ReserveHost`), and all shares together stay within the budget.

Rules:
- A question is answered at once: the share is then what was asked for, or what it was before.
- Giving back is always allowed; the share of a client that is gone is free at once.
- Nothing outlives a restart: hooks ask again when they have connected again.
- A budget below what is out already takes nothing away; nothing more is given until enough has come back.

May not go here: what a client uses its share for (orders.py, admission.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator import admission
from coordinator.commands import Notify, Send
from coordinator.events import HostAsked, HostBudgetSet
from coordinator.state import Client, Gpu, Node
from coordinator.wire import HostReserved


def ask(node: Node, client: Client, event: HostAsked) -> Iterable[Gpu]:
    """Answer a question for a share of so many bytes in all."""
    client.host_asked = True
    more = event.total_bytes - client.host_share_bytes
    if more <= 0 or node.host_shared_bytes + more <= node.host_budget_bytes:
        client.host_share_bytes += more
        node.host_shared_bytes += more
    else:
        admission.note_refusal(node, None, client, event.total_bytes, "host")
    node.out.append(Send(client.client, HostReserved(event.sequence, client.host_share_bytes)))
    # Others may have to move, or may do so again, now that there is less or more room for what they have.
    return [seat.gpu for seat in client.seats.values()]


def forget(node: Node, client: Client) -> None:
    """The client is gone."""
    node.host_shared_bytes -= client.host_share_bytes
    client.host_share_bytes = 0


def set_budget(node: Node, event: HostBudgetSet) -> Iterable[Gpu]:
    """From now on."""
    node.host_budget_bytes = event.budget_bytes
    values: dict[str, int | str | bool | float | None] = {
        "budget_bytes": event.budget_bytes,
        "shared_bytes": node.host_shared_bytes,
    }
    node.out.append(Notify("host_budget", values))
    return list(node.gpus.values())
