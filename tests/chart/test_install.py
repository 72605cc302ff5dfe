"""`charts/install`, beside doubles of podman, kubectl and helm that note their command lines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.chart.conftest import render
from tests.conftest import ROOT

IMAGE = "0123456789abcdef" * 4
DOUBLE = f"""#!/bin/sh
echo "${{0##*/}} $*" >> "$NOTES"
case "$*" in
    build*--iidfile*) while [ "$1" != --iidfile ]; do shift; done; echo sha256:{IMAGE} > "$2" ;;
    "get namespace"*) exit "$MISSING" ;;
esac
"""


def install(tmp_path: Path, *words: str, builder: str = "podman", missing: int = 1) -> list[str]:
    """The command lines that `charts/install` ran."""
    doubles, notes = tmp_path / "doubles", tmp_path / "notes"
    doubles.mkdir()
    for name in (builder, "kubectl", "helm"):
        (doubles / name).write_text(DOUBLE, encoding="utf-8")
        (doubles / name).chmod(0o755)
    for name in ("bash", "dirname", "mktemp", "rm", "sed", "cat"):
        (doubles / name).symlink_to(next(p for d in os.get_exec_path() if (p := Path(d) / name).exists()))
    environ = {"PATH": str(doubles), "NOTES": str(notes), "MISSING": str(missing)}
    subprocess.run([str(ROOT / "charts" / "install"), *words], env=environ, check=True, timeout=60)
    return notes.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("builder", ["podman", "docker"])
def test_one_command_installs(tmp_path: Path, builder: str) -> None:
    """Broken: the chart pulls another image than the one pushed, or a step is missing."""
    image = f"registry.example.com/team/nvshare:0.2.0-{IMAGE[:12]}"
    done = install(tmp_path, "registry.example.com/team/", "--set", "runtimeClassName=nvidia", builder=builder)
    assert [line.split(" --")[0] for line in done] == [
        f"{builder} build",
        f"{builder} tag sha256:{IMAGE} {image}",
        f"{builder} push {image}",
        "kubectl get namespace nvshare",
        "kubectl create namespace nvshare",
        "kubectl label namespace nvshare pod-security.kubernetes.io/enforce=privileged",
        "helm upgrade",
        "helm test nvshare",
    ]
    assert done[-2].endswith(" --set runtimeClassName=nvidia")
    registry, tag = done[-2].split("image.registry=")[1].split()[0].split(",image.tag=")
    containers = render({"image": {"registry": registry, "tag": tag}}).one("DaemonSet")["spec"]["template"]["spec"]
    assert {each["image"] for each in containers["containers"]} == {image}


def test_a_namespace_of_yours_keeps_its_labels(tmp_path: Path) -> None:
    """Broken: the script loosens Pod Security in a namespace that it did not create."""
    done = install(tmp_path, "registry.example.com", missing=0)
    assert not [line for line in done if line.startswith(("kubectl create", "kubectl label"))]
