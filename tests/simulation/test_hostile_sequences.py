"""Sequences of valid messages of hostile peers: none of them is a mistake of the coordinator, or costs honest ones."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.engine import scheduler
from nvshare.coordinator.engine.event_log import InvariantError
from nvshare.coordinator.model.client import Parking
from nvshare.coordinator.protocol import messages
from tests.harness import SEEDS
from tests.simulation.hostile_node import Node

SEQUENCES = 160


def live(directory: Path, seeds: range) -> None:
    """Runs the sequences of these seeds."""
    for seed in seeds:
        try:
            Node(seed, directory / f"journal-{seed}").live()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_no_sequence_of_valid_messages_harms_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broken: a user's process ends the coordinator, or keeps others from their turns, by what it says and when."""
    caplog.set_level(logging.CRITICAL)
    live(tmp_path, range(SEQUENCES * SEEDS))


def test_a_parked_peer_that_may_claim_a_lease_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the sequences would not find what once ended a coordinator: a peer with a lease is woken elsewhere."""
    caplog.set_level(logging.CRITICAL)
    attach = scheduler._OF_CLIENT[messages.AttachGpu]

    def believes(node: Any, client: Any, message: messages.AttachGpu, now_ns: int) -> Any:
        return attach(node, client, replace(message, parked=message.parked and not client.seats), now_ns)

    monkeypatch.setitem(scheduler._OF_CLIENT, messages.AttachGpu, believes)
    monkeypatch.setattr(Parking, "closed", False)
    with pytest.raises(InvariantError, match="while it is moved"):
        live(tmp_path, range(2 * SEQUENCES))
