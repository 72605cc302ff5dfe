"""The build: what the wheel must hold, and what its libraries may ask of the system.

Non-goals: what the libraries do.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import yaml

from tests.conftest import ROOT, Built

LIBRARIES = (
    "nvshare/client_hook/lib/libnvshare_hook.so",
    "nvshare/client_hook/lib64/libnvshare_hook.so",
    f"nvshare/client_hook/lib/{os.uname().machine}-linux-gnu/libnvshare_hook.so",
    "nvshare/simulated_gpu/lib/libcuda.so.1",
    "nvshare/simulated_gpu/lib/libnvidia-ml.so.1",
)


def test_the_libraries_load(built: Built) -> None:
    """A library with an unresolved symbol would kill every program that it is preloaded into."""
    for path in (built.sim_dir / "libcuda.so.1", built.sim_dir / "libnvidia-ml.so.1", built.hook):
        assert path.is_file(), path
        ctypes.CDLL(str(path))


EMPTY_SOURCES = """#!/bin/sh
for word; do
    shift
    case "$word" in
        "$SOURCES"/client_hook/*.c | "$SOURCES"/simulated_gpu/*.c) set -- "$@" -x c /dev/null ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec cc "$@"
"""
"""A compiler that takes our sources for empty: the files of a wheel do not depend on them, `built` compiles them."""


def build_wheel(place: Path) -> Path:
    """A wheel of this checkout, built with what is installed here, of empty libraries."""
    compiler = place / "empty-cc"
    compiler.write_text(EMPTY_SOURCES)
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += [f"--config-settings=build-dir={place / 'build'}", "--wheel-dir", str(place), str(ROOT)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"CC": str(compiler), "SOURCES": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = place.glob("*.whl")
    return found


def test_wheel_is_complete(tmp_path: Path) -> None:
    """Broken: a file is missing on the user's machine, a library is a link, or each Python needs a wheel of its own."""
    wheel = build_wheel(tmp_path)
    assert re.fullmatch(r"nvshare-[\d.]+-py3-none-(linux|manylinux)_\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert all(archive.read(name)[:4] == b"\x7fELF" for name in LIBRARIES)
    wanted = {
        *LIBRARIES,
        "nvshare/coordinator/py.typed",
        "nvshare/coordinator/daemon/main.py",
        *(f"nvshare/coordinator/web/static/{name}" for name in ("index.html", "page.css", "page.js")),
        "nvshare/bench/programs/gate_loop.c",
        "nvshare/bench/programs/saturate.c",
    }
    assert not wanted - names, wanted - names
    assert [name for name in names if re.fullmatch(r"[^/]+\.pth", name)], "the opt-in's .pth must lie at the root"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    parts = [name.split("/") for name in names]
    assert {part[0] for part in parts} == {
        "nvshare",
        "nvshare_autoload.pth",
        next(p[0] for p in parts if "dist-info" in p[0]),
    }
    assert not [name for name in names if "/src/" in name or "/results/" in name or name.startswith("nvshare/tests/")]


def test_the_sdist_has_sources_and_no_results(tmp_path: Path) -> None:
    """A source archive without a source cannot be built; one with every measurement is several times its size."""
    checkout = tmp_path / "checkout"  # a copy: skipping the files of an environment takes longer than all the rest
    skipped = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, checkout, ignore=skipped, symlinks=True)
    (checkout / "build").mkdir()
    (checkout / "build" / "junk.py").touch()
    script = f"import scikit_build_core.build as b; print(b.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {"CMakeLists.txt", "client_hook/src/init.c", "coordinator/daemon/main.py", "tests/conftest.py"}
    assert not wanted - names
    assert [name for name in names if name.startswith("nvshare/")] == ["nvshare/__init__.py"], "every source twice"
    assert not [name for name in names if "/results/" in name or name.startswith((".github", "build/"))]


def test_no_compiler_is_one_sentence(tmp_path: Path) -> None:
    """CMake's own message is a page, and none of it says what to install."""
    for tool in ("cmake", "ninja", "uname"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    line = [str(tmp_path / "cmake"), "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Install one: `apt install gcc libc6-dev`" in " ".join(done.stderr.split())


def test_workflows_pin_their_actions() -> None:
    """An action by branch is somebody else's code of tomorrow, with this repository's rights."""
    uses = [
        step["uses"]
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
        if "uses" in step
    ]
    assert uses
    assert [each for each in uses if not re.fullmatch(r"[\w./-]+@(v\d+\.\d+\.\d+|[0-9a-f]{40})", each)] == []
