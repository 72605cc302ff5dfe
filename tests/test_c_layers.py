"""The layers of the C sources, executable: nothing knows what stands above it, and no two files know each other.

How: a unit is a source with its header.  It depends on the units whose headers it includes, and, by the symbols of its
object file, on the units that define what it uses.  Exempt are functions that the library exports, as tables name them
and the application may call them from anywhere, and data that `init.c` defines, which wires the layers together.
"""

from __future__ import annotations

import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT, Built

LAYERS = {
    "client_hook": "nvshare base driver gate contexts inflight host memory swap ipc coord hooks init",
    "simulated_gpu": (
        "base device/device device/charge device/devices stream/stream stream/queue device/current "
        "memory/memory memory/table memory/peers module/module "
        "graph/user_objects graph/graph graph/graph_memory graph/capture "
        "memory/managed memory/effect stream/kernel_time stream/executor "
        "memory/pool stream/streams memory/allocations memory/vmm memory/ipc memory/copy "
        "module/images module/modules module/kernels module/tensor_map "
        "graph/nodes graph/exec device/contexts device/checkpoint "
        "module/runtime nvml nvml_unsupported"
    ),
}
"""Lowest first, below `src/`: folders, or each file where a subject has files on several levels."""

LIBRARIES = {"client_hook": "nvshare_hook", "simulated_gpu": "simulated_cuda"}

Graph = dict[str, set[str]]


def by_headers(source: Path) -> Graph:
    """Headers that each unit includes."""
    graph: Graph = {}
    for path in sorted(source.rglob("*.[ch]")):
        unit = str(path.relative_to(source).with_suffix(""))
        headers = re.findall(r'^#include "([^"]+)\.h"', path.read_text(encoding="utf-8"), re.MULTILINE)
        graph.setdefault(unit, set()).update({name for name in headers if (source / f"{name}.h").exists()} - {unit})
    return graph


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, name) as nm prints them."""
    output = subprocess.check_output(["nm", *options, str(path)], text=True)
    return [(fields[-2], fields[-1]) for line in output.splitlines() if len(fields := line.split()) >= 2]


def by_symbols(source: Path, objects: Path, exported: set[str]) -> Graph:
    """Units whose functions and variables each unit uses."""
    owner: dict[str, str] = {}
    used: Graph = {}
    for path in sorted(objects.rglob("*.o")):
        unit = str(path.relative_to(objects)).removesuffix(".c.o")
        if not (source / f"{unit}.c").exists():
            continue  # left in the build tree by an older checkout
        for kind, name in symbols(path):
            if kind == "U":
                used.setdefault(unit, set()).add(name)
            elif kind.isupper() and name not in exported and (unit != "init" or kind == "T"):
                owner[name] = unit
    return {unit: {owner[name] for name in names if name in owner} - {unit} for unit, names in used.items()}


def complaints(part: str, graph: Graph) -> list[str]:
    """Every dependency upwards, and a cycle if there is one."""
    layers = LAYERS[part].split()

    def level(unit: str) -> int:
        return layers.index(unit if unit in layers else unit.split("/")[0])

    upwards = [
        f"{unit} knows {other}, which stands above it"
        for unit, others in sorted(graph.items())
        for other in sorted(others)
        if level(other) > level(unit)
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        upwards.append("a cycle: " + " <- ".join(error.args[1]))
    return upwards


@pytest.mark.parametrize("part", LAYERS)
def test_headers(part: str) -> None:
    """Broken: a folder or file includes one above it, or two files include each other's headers."""
    assert complaints(part, by_headers(ROOT / part / "src")) == []


@pytest.mark.parametrize("part", LAYERS)
def test_symbols(part: str, built: Built) -> None:
    """Broken: a call upwards, or a cycle of calls, that hides behind a common header."""
    library = built.hook if part == "client_hook" else built.sim_dir / "libcuda.so.1"
    exported = {name for _, name in symbols(library, "-D", "--defined-only")}
    objects = built.build_dir / part / "CMakeFiles" / f"{LIBRARIES[part]}.dir" / "src"
    assert complaints(part, by_symbols(ROOT / part / "src", objects, exported)) == []


@pytest.mark.parametrize("part", LAYERS)
def test_the_page_lists_the_layers(part: str) -> None:
    """Broken: the table that a newcomer reads has another order than the code."""
    source = ROOT / part / "src"
    named = re.findall(r"^\| `([\w./]+?)/?` \|", (source / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    layers = [name for name in LAYERS[part].split() if (source / name).is_dir() or (source / f"{name}.c").exists()]
    assert [name.removesuffix(".c") for name in named] == layers
