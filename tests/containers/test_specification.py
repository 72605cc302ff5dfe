"""The CDI specification: what CDI demands of it, and what containers need of it."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import referencing

from tests.conftest import Built
from tests.containers.engines import edits_for, simulated_coordinator
from tests.daemon.processes import Coordinators, ctl

ROOT = Path(__file__).resolve().parents[2]
_PACKAGED: Final = "share/gocode/src/github.com/container-orchestrated-devices/container-device-interface/schema"
SCHEMAS: Final = [Path("/usr") / _PACKAGED, ROOT / "build" / "cdi" / "usr" / _PACKAGED]
"""CDI's own JSON schema, where Debian's golang-github-container-orchestrated-devices-container-device-interface-dev or
`.ci/run` puts it."""
DEVICE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nvs-") as made:
        yield Path(made)


@pytest.fixture(scope="module", params=["simulated", "real"])
def made(request: pytest.FixtureRequest, built: Built) -> Iterator[dict[str, Any]]:
    """The specification for simulated GPUs, and for those of a coordinator that takes its GPUs for real ones."""
    del built  # it names the libraries
    with tempfile.TemporaryDirectory(prefix="nvs-") as path:
        base = Path(path)
        options = ("install", "cdi", "--library-dir", str(base / "lib"), "-o", "-")
        if request.param == "simulated":
            with simulated_coordinator(base / "run"):
                yield json.loads(ctl(base / "run", *options).stdout)
            return
        running = Coordinators(base).start(gpus=2)
        yield json.loads(ctl(running.directory.path, *options).stdout)
        running.kill()


def is_simulated(made: dict[str, Any]) -> bool:
    return any("simulated" in mount["hostPath"] for mount in made["containerEdits"]["mounts"])


def test_it_follows_the_rules_of_cdi(made: dict[str, Any]) -> None:
    """Broken: an engine refuses the file for what no schema says, and says so only in its log."""
    assert made["cdiVersion"] == "0.5.0"
    names = [device["name"] for device in made["devices"]]
    assert names[:2] == ["all", "0"]
    assert len(names) == len(set(names)) == 5
    for name in names:
        assert DEVICE.fullmatch(name)
        assert edits_for(made, f"{made['kind']}={name}")[1]  # an empty edit is an error
    for edits in (made["containerEdits"], *(device["containerEdits"] for device in made["devices"])):
        for mount in edits.get("mounts", []):
            assert mount["containerPath"].startswith("/")
            assert Path(mount["hostPath"]).is_absolute()
            assert Path(mount["hostPath"]).exists()


def test_it_follows_the_schema_of_cdi(made: dict[str, Any]) -> None:
    """Broken: the file has a shape that CDI's published schema forbids."""
    folder = next((each for each in SCHEMAS if (each / "schema.json").exists()), None)
    if folder is None:
        pytest.skip("CDI's schema is not here; .ci/run unpacks Debian's package of it")
    names = ("schema.json", "defs.json")
    contents = {name: json.loads((folder / name).read_text()) for name in names}
    draft = referencing.jsonschema.DRAFT7
    registry: Any = referencing.Registry().with_resources(
        (name, draft.create_resource(content)) for name, content in contents.items()
    )
    check = jsonschema.Draft7Validator(contents["schema.json"], registry=registry)
    check.validate(made)
    broken = copy.deepcopy(made)
    broken["devices"][0]["containerEdits"]["env"] = "no list"
    assert not check.is_valid(broken)


def test_a_container_keeps_its_own_options(made: dict[str, Any]) -> None:
    """Broken: the specification, which wins over the container's variables, sets an option of the program or hides a
    GPU that NVIDIA's device shows."""
    names = {variable.partition("=")[0] for device in made["devices"] for variable in device["containerEdits"]["env"]}
    of_the_driver = {"LD_LIBRARY_PATH", "NVSHARE_SIM_STATE", "CUDA_VISIBLE_DEVICES"}
    assert names == {"NVSHARE_SOCKET"} | (of_the_driver if is_simulated(made) else set())


def test_containers_change_nothing_outside(made: dict[str, Any]) -> None:
    """Broken: a container may write to the hook that others load, or to the coordinator's directory."""
    mounts = made["containerEdits"]["mounts"]
    writable = [mount["containerPath"] for mount in mounts if "ro" not in mount["options"]]
    assert writable == (["/run/nvshare/simulated_gpu"] if is_simulated(made) else [])
    (preload,) = (mount["hostPath"] for mount in mounts if mount["containerPath"] == "/etc/ld.so.preload")
    (library,) = (mount["hostPath"] for mount in mounts if mount["containerPath"] == "/opt/nvshare")
    named = Path(preload).read_text().strip()
    assert named.startswith("/opt/nvshare/")
    assert (Path(library) / named.removeprefix("/opt/nvshare/")).is_file()


def test_the_file_is_replaced_and_removed(base: Path) -> None:
    """Broken: an engine reads half a file or one that nobody else may read, or the file cannot be taken away."""
    file = base / "etc" / "cdi" / "nvshare.json"
    running = Coordinators(base).start()
    words = ("install", "cdi", "--library-dir", str(base / "lib"), "-o", str(file))
    for _ in range(2):
        done = ctl(running.directory.path, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "nvshare.com/gpu=all, nvshare.com/gpu=0" in done.stdout
    assert file.stat().st_mode & 0o777 == 0o644
    assert os.listdir(file.parent) == ["nvshare.json"]  # noqa: PTH208 - names
    running.kill()
    for _ in range(2):
        assert ctl(running.directory.path, "install", "cdi", "--remove", "-o", str(file)).returncode == 0
        assert not file.exists()


def test_errors_name_the_remedy(base: Path) -> None:
    """Broken: a failed installation leaves a traceback or a half-written file."""
    away = ctl(base / "nobody", "install", "cdi", "-o", "-")
    assert away.returncode == 3
    assert "no coordinator runs in" in away.stderr
    running = Coordinators(base).start()
    (base / "file").touch()
    options = ("--library-dir", str(base / "lib"), "-o", str(base / "file" / "nvshare.json"))
    done = ctl(running.directory.path, "install", "cdi", *options)
    running.kill()
    assert done.returncode == 1
    assert "run this as root, or choose another --output" in done.stderr
