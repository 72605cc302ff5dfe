"""Generated and repeated texts agree with their source."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from nvshare.coordinator.protocol import codegen, messages

ROOT = Path(__file__).resolve().parent.parent


def test_header_is_up_to_date() -> None:
    """Broken: coordinator/protocol/messages.py was changed and the hook still speaks the old protocol."""
    assert codegen.TARGET.read_text() == codegen.generate(), "run python -m nvshare.coordinator.protocol.codegen"
    assert codegen.main(["--check"]) == 0


def test_version_of_the_hook() -> None:
    """Broken: the hook says another version than the package that it comes in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    header = (ROOT / "client_hook/src/base/base.h").read_text()
    assert re.search(r'#define NVS_VERSION "(.*)"', header).group(1) == project  # type: ignore[union-attr]


def test_gpu_bound_of_the_hook() -> None:
    """Broken: the hook uses ordinals that the coordinator refuses."""
    header = (ROOT / "client_hook/src/base/base.h").read_text()
    assert f"#define NVS_MAX_GPUS {messages.MAX_GPUS_PER_CLIENT}u" in header
