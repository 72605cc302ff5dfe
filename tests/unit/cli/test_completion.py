"""The words that the tab key offers for nvshare-ctl and nvshare-coordinator, as typer's script asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from nvshare.coordinator.cli import ctl, ctl_call


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("nvshare-ctl set policy fair", {"fair_share"}),
        ("nvshare-coordinator --switch", {"--switch-share"}),
    ],
)
def test_the_tab_key_completes(line: str, offered: set[str]) -> None:
    """Broken: the tab key offers nothing, or the wrong words."""
    words = line.split()
    variable = f"_{words[0].upper().replace('-', '_')}_COMPLETE"
    environ = {**os.environ, variable: "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    program = Path(sys.executable).parent / words[0]
    done = subprocess.run([program], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == offered


def test_it_offers_the_programs_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: no names behind `nvshare-ctl pause`, or a traceback there where no coordinator runs."""
    context = typer.Context(typer.main.get_command(ctl.app))
    context.params["where"] = Path("/nowhere")
    assert ctl_call.complete_client(context) == []
    status = {"clients": [{"name": name} for name in ("train", "serve", "train")]}
    monkeypatch.setattr(ctl_call, "call", lambda *_: status)
    assert ctl_call.complete_client(context) == ["serve", "train"]
