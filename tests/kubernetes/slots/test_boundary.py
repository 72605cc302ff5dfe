"""The driver's memory limit of a container beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvshare.coordinator.kubernetes.slots import boundary

GIB = 1 << 30


@pytest.mark.parametrize(
    ("driver", "applied"), [("615.10.2\n", True), ("580.95\n", False), ("odd", False), (None, False)]
)
def test_the_drivers_limit_leaves_room_for_contexts(
    driver: str | None, applied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the driver ends programs that keep to their limit, or a container without a limit gets one."""
    module = tmp_path / "version"
    if driver is not None:
        module.write_text(driver)
    monkeypatch.setattr(boundary, "_MODULE", module)
    monkeypatch.setattr(boundary, "_CGROUP_2", tmp_path)
    named = {"NVIDIA_GPU_MEMORY_LIMIT": "8704"}
    assert boundary.environment(8 * GIB, "auto") == (named if applied else {})
    assert boundary.environment(8 * GIB, "on") == named
    assert boundary.environment(8 * GIB - 1, "on", processes=3) == {"NVIDIA_GPU_MEMORY_LIMIT": str(8192 + 3 * 512)}
    assert boundary.environment(8 * GIB, "off") == boundary.environment(0, "on") == {}
