"""The Compose file of docs/how-to/containers.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvshare.coordinator.model.profile import JOB_CLASS, MEMORY_MODES

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILE = DOCS / "how-to" / "compose.yaml"


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """As podman-compose reads them, with what they have in common in each."""
    words = ["--podman-path", shutil.which("echo") or "echo"]  # of podman it asks the version alone
    command = [sys.executable, "-m", "podman_compose", *words, "-f", str(FILE), "config"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = yaml.safe_load(done.stdout)["services"]
    return found


def test_every_service_shares_the_gpu(services: dict[str, dict[str, Any]]) -> None:
    """Broken: a service of the example has no GPU, or does not share it."""
    assert services.keys() == {"ollama", "comfyui", "jupyter", "train"}
    for service in services.values():
        assert service["devices"] == ["nvidia.com/gpu=all", "nvshare.com/gpu=all"]
        assert ("image" in service) != ("build" in service)


def test_options_are_those_of_the_hook(services: dict[str, dict[str, Any]]) -> None:
    """Broken: a variable of the example has no effect, or a value that the hook ignores."""
    pages = (DOCS / "reference" / page for page in ("environment.md", "commands.md"))
    documented = "".join(page.read_text(encoding="utf-8") for page in pages)
    for service in services.values():
        for name, value in service["environment"].items():
            if name.startswith("NVSHARE_"):
                assert re.search(rf"`{name}`", documented), name
            allowed = {"NVSHARE_CLASS": JOB_CLASS.words, "NVSHARE_MEMORY": MEMORY_MODES}.get(name)
            assert allowed is None or value in allowed, (name, value)


def test_ports_are_open_to_this_machine_only(services: dict[str, dict[str, Any]]) -> None:
    """Broken: the example opens a model server or a notebook to the network."""
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(str(port).startswith("127.0.0.1:") for port in ports)
