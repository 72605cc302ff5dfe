"""`NVSHARE_ENABLE=1 python ...`: the interpreter starts once more under the hook, and nothing else about it changes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nvshare.client_hook.launcher import find_hook
from tests.launch.conftest import module_runtime as runtime
from tests.launch.conftest import runtime_directory

__all__ = ["runtime"]  # fixture

PROBE = """
import json, os, sys
with open("/proc/self/maps") as maps:
    hooked = "libnvshare_hook" in maps.read()
print(json.dumps({
    "argv": [os.fsencode(a).hex() for a in sys.argv],
    "command": sys.orig_argv,
    "executable": sys.executable,
    "prefix": sys.prefix,
    "path": sys.path,
    "flags": repr(sys.flags),
    "options": repr((sys.warnoptions, sys._xoptions)),
    "directory": os.getcwd(),
    "input": sys.stdin.read() if __name__ == "__main__" and not sys.stdin.isatty() else "",
    "hooked": hooked,
    "marker": os.environ.get("NVSHARE_REEXEC"),
}))
"""


@pytest.fixture
def enabled(environ: dict[str, str]) -> dict[str, str]:
    """Opted in, on simulated GPUs."""
    environ.pop("PYTHONPATH")
    return environ | {"NVSHARE_ENABLE": "1", "NVSHARE_SIMULATE": "1x1GiB"}


def call(
    command: list[str | bytes | Path], environ: dict[str, str], directory: Path, data: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [os.fspath(word) for word in command],
        env=environ,
        cwd=directory,
        input=data,
        capture_output=True,
        text=True,
        check=False,
    )


def probe(
    command: list[str | bytes | Path], environ: dict[str, str], directory: Path, data: str = ""
) -> dict[str, Any]:
    done = call(command, environ, directory, data)
    assert (done.returncode, done.stderr) == (0, "")
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


FORMS: dict[str, list[str | bytes]] = {
    "script": ["probe.py", "a b", "", "--name=x"],
    "bytes": ["probe.py", b"\xff\xfe"],
    "command": ["-c", PROBE, "x", "-c"],
    "module": ["-m", "probe", "-m"],
    "package": ["-m", "bundle"],
    "flags": ["-u", "-B", "-O", "-X", "utf8", "-X", "dev", "-W", "ignore::UserWarning", "probe.py"],
    "isolated": ["-I", "-c", PROBE],
    "no environment": ["-E", "-c", PROBE],
    "safe path": ["-P", "probe.py"],
    "directory": ["bundle"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with the probe in each form."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "__main__.py").write_text(PROBE)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_start_stays_as_it_is(python: Path, enabled: dict[str, str], place: Path, form: str) -> None:
    """Else a program would meet other arguments, flags, paths or input because it is hooked."""
    command = [python, *FORMS[form]]
    plain = probe(command, enabled | {"NVSHARE_ENABLE": "0"}, place, "data\n")
    hooked = probe(command, enabled, place, "data\n")
    assert (plain.pop("hooked"), hooked.pop("hooked")) == (False, True)
    assert hooked == plain


def test_a_program_from_standard_input(python: Path, enabled: dict[str, str], place: Path) -> None:
    """Else the first interpreter would eat the program."""
    done = call([python, "-", "word"], enabled, place, "import sys; print(sys.argv)\n" + PROBE)
    assert done.stdout.splitlines()[0] == "['-', 'word']"
    assert json.loads(done.stdout.splitlines()[1])["hooked"] is True


def test_a_script_with_an_interpreter_line(python: Path, enabled: dict[str, str], place: Path) -> None:
    """Else console scripts, jupyter above all, would not be hooked."""
    script = place / "jupyter"
    script.write_text(f"#!{python}\n{PROBE}")
    script.chmod(0o755)
    assert probe([script, "lab"], enabled, place)["hooked"] is True


def test_an_interpreter_found_by_path(python: Path, enabled: dict[str, str], place: Path) -> None:
    """Else `python train.py` in an activated environment would lose that environment."""
    seen = probe(["python", "probe.py"], enabled | {"PATH": f"{python.parent}:{enabled['PATH']}"}, place)
    assert seen["hooked"] is True
    assert seen["prefix"] == str(python.parent.parent)


def test_it_can_be_off(python: Path, enabled: dict[str, str], place: Path) -> None:
    """Else nobody could turn it off for one program, or `python -S` and our own tools would start a coordinator."""
    with runtime_directory() as unused:
        own = enabled | {"NVSHARE_RUNTIME_DIR": str(unused.path)}
        for change in ({"NVSHARE_ENABLE": ""}, {"NVSHARE_ENABLE": "0"}, {"NVSHARE_DISABLE": "1"}):
            assert probe([python, "probe.py"], own | change, place)["hooked"] is False
        assert probe([python, "-S", "-c", PROBE], own, place)["hooked"] is False
        tool = place / "nvshare-ctl"
        tool.write_text(f"#!{python}\n{PROBE}")
        tool.chmod(0o755)
        assert probe([tool, "status"], own, place)["hooked"] is False
        assert call([python, "-m", "nvshare.coordinator.cli.run", "--help"], own, place).returncode == 0
        assert list(unused.path.iterdir()) == []


def test_a_program_that_has_the_hook_stays_as_it_is(python: Path, enabled: dict[str, str], place: Path) -> None:
    """Broken: a program in a container with a slot, whose LD_PRELOAD does not name the hook, starts a coordinator."""
    preloaded = place / "preloaded.so"
    preloaded.symlink_to(find_hook(enabled))
    with runtime_directory() as unused:
        own = enabled | {"NVSHARE_RUNTIME_DIR": str(unused.path), "LD_PRELOAD": str(preloaded)}
        assert probe([python, "probe.py"], own, place)["hooked"] is True
        assert list(unused.path.iterdir()) == []


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing_children_are_hooked(python: Path, enabled: dict[str, str], place: Path, method: str) -> None:
    """Else data loaders and workers would break, or slip past the coordinator."""
    (place / "pool.py").write_text(
        "import multiprocessing as m\n"
        "def hooked(n):\n"
        "    return n, 'libnvshare_hook' in open('/proc/self/maps').read()\n"
        "if __name__ == '__main__':\n"
        f"    with m.get_context('{method}').Pool(2) as pool:\n"
        "        print(pool.map(hooked, range(4)))\n"
    )
    done = call([python, "pool.py"], enabled, place)
    assert (done.stdout, done.stderr) == ("[(0, True), (1, True), (2, True), (3, True)]\n", "")


def test_a_failure_is_one_line_and_the_program_runs(python: Path, enabled: dict[str, str], place: Path) -> None:
    """Else a mistake in the set-up would keep people from working, or stay unnoticed."""
    child = (
        "import subprocess, sys; from nvshare.client_hook.api import HookNotLoadedError\n"
        "print('banana' in str(HookNotLoadedError()), flush=True)\n"
        "sys.exit(subprocess.call([sys.executable, '-c', 'print(1)']))"
    )
    with runtime_directory() as unused:
        own = enabled | {"NVSHARE_RUNTIME_DIR": str(unused.path), "NVSHARE_QUANTUM": "banana"}
        done = call([python, "-c", child], own, place)
    assert (done.returncode, done.stdout) == (0, "True\n1\n"), "the reason is also known to the program"
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nvshare: ")
    assert done.stderr.endswith("continuing without the hook\n")


def test_a_library_that_does_not_load_ends_in_one_retry(
    python: Path, enabled: dict[str, str], place: Path, tmp_path: Path
) -> None:
    """Else the interpreter would execute itself for ever."""
    broken = tmp_path / "libnvshare_hook.so"
    broken.write_bytes(b"not a library")
    done = call([python, "-c", "print(1)"], enabled | {"NVSHARE_HOOK_LIBRARY": str(broken)}, place)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "did not load" in done.stderr


def test_a_worker_of_an_enabled_program_gets_a_lease(python: Path, enabled: dict[str, str], place: Path) -> None:
    """Else opting in would load the hook, and the work would run without the coordinator all the same."""
    (place / "train.py").write_text(
        "import multiprocessing\n"
        "from nvshare import client_hook\n"
        "from nvshare.bench.workloads.busy import Load, Program\n"
        "def work():\n"
        "    program = Program(Load(kernel_ns=1000, burst=4, copy_bytes=4096))\n"
        "    program.iteration(7)\n"
        "    program.finish()\n"
        "    print(client_hook.active(), client_hook.state().lease_id > 0, program.mismatches)\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    worker.start()\n"
        "    worker.join()\n"
    )
    done = call([python, "train.py"], enabled | {"NVSHARE_MEMORY": "device"}, place)
    assert (done.stdout, done.stderr) == ("True True 0\n", "")
