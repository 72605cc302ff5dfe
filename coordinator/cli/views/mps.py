"""The line of `nvshare-ctl status` about MPS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvshare.coordinator.cli.views.words import count
from nvshare.coordinator.system.users import user_name


def mps_line(mps: Mapping[str, Any]) -> str:
    """State of MPS; for a refusal its reason."""
    if mps["mode"] == "off":
        return "MPS: off"
    state, programs = mps["state"], count(mps["programs"], "program")
    if state == "refused":
        return f"MPS: refused, programs run without it: {mps['reason']}"
    if state == "waiting":
        return f"MPS: restarts for {programs}: {mps['reason']}"
    if state == "idle":
        return "MPS: on, starts with the first program"
    return f"MPS: {state} for user {user_name(mps['user'])}, {programs}"
