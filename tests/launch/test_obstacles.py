"""Programs that the hook cannot get into: they run as if it were not there, and whoever started them is told why."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.client_hook.launcher import HOOK_NAME, names_hook_for_glibc_alone, preloadable, without_hook
from nvshare.client_hook.obstacles import find_obstacle
from tests.conftest import Built
from tests.launch.conftest import module_runtime as runtime

__all__ = ["runtime"]  # fixture

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SOURCE = Path(__file__).parent / "programs" / "look_around.c"
WIDE, NARROW = 2, 1
X86_64, ARM = 62, 40
NOBODY = 65534


def compiled(compiler: str, out: Path, *flags: str) -> Path:
    """The program that says whether the hook is in it."""
    subprocess.run([compiler, *flags, "-o", str(out), str(SOURCE)], check=True)
    return out


@pytest.fixture
def for_musl(tmp_path: Path) -> Path:
    """That program, linked against musl."""
    compiler = shutil.which("musl-gcc")
    if compiler is None:
        pytest.skip("musl-gcc is missing (Debian: apt-get install musl-tools)")
    return compiled(compiler, tmp_path / "for_musl")


def elf(path: Path, loader: str = "", *, width: int = WIDE, machine: int | None = None) -> Path:
    """An executable that is nothing but headers."""
    machine = struct.unpack("=H", Path("/proc/self/exe").read_bytes()[18:20])[0] if machine is None else machine
    start = b"\x7fELF" + bytes([width, 1 if struct.pack("=H", 1)[0] else 2, 1]) + bytes(9)
    text = os.fsencode(loader) + b"\0"
    if width == WIDE:
        header = struct.pack("=HHIQQQIHHHHHH", 2, machine, 1, 0, 64, 0, 0, 64, 56, 1 if loader else 0, 0, 0, 0)
        entry = struct.pack("=IIQQQQQQ", 3, 4, 120, 0, 0, len(text), len(text), 1)
    else:
        header = struct.pack("=HHIIIIIHHHHHH", 2, machine, 1, 0, 52, 0, 0, 52, 32, 1 if loader else 0, 0, 0, 0)
        entry = struct.pack("=IIIIIIII", 3, 84, 0, 0, len(text), len(text), 4, 1)
    path.write_bytes(start + header + entry + text)
    path.chmod(0o755)
    return path


def test_a_program_for_musl_runs_without_the_hook(nvshare_run: Run, for_musl: Path) -> None:
    """musl's loader would load the hook, miss glibc's functions in it and end the program with 127."""
    done = nvshare_run("--", str(for_musl))
    assert (done.returncode, done.stdout.split()[0]) == (0, "plain"), done.stderr
    assert "linked against musl" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_program_for_musl_below_a_shell_runs_without_the_hook(nvshare_run: Run, for_musl: Path) -> None:
    """nvshare-run does not see what a shell starts, so the preload itself must do no harm there."""
    done = nvshare_run("--", "sh", "-c", f"{for_musl} && grep -q {HOOK_NAME} /proc/self/maps && echo yes")
    assert done.returncode == 0, done.stderr
    assert (done.stdout.split()[0], done.stdout.split()[-1]) == ("plain", "yes")
    assert done.stderr == ""


def test_a_hook_at_a_plain_path_is_taken_away_from_musl(
    nvshare_run: Run, for_musl: Path, built: Built, tmp_path: Path
) -> None:
    """Such a path leads every loader to the hook: a build tree, or an installation that somebody moved."""
    plain = tmp_path / HOOK_NAME
    shutil.copy(built.hook, plain)
    done = nvshare_run("--", str(for_musl), NVSHARE_HOOK_LIBRARY=str(plain), LD_PRELOAD="libanl.so.1")
    assert (done.returncode, done.stdout) == (0, "plain libanl.so.1\n"), done.stderr
    hooked = nvshare_run("--", "grep", "-c", HOOK_NAME, "/proc/self/maps", NVSHARE_HOOK_LIBRARY=str(plain))
    assert hooked.returncode == 0, hooked.stderr


def test_scripts_are_judged_by_what_runs_them(nvshare_run: Run, for_musl: Path, tmp_path: Path) -> None:
    """Else a script for a musl interpreter would die, and nobody would be told."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.write_text(f"#!{for_musl}\n")
    outer.write_text(f"#! /usr/bin/env {inner}\n")
    for script in (inner, outer):
        script.chmod(0o755)
    done = nvshare_run("--", str(outer))
    assert (done.returncode, done.stdout.split()[0]) == (0, "plain"), done.stderr
    assert f"{outer} is a script for {for_musl}, which is linked against musl" in done.stderr


def test_a_static_program_runs_and_its_user_is_told(nvshare_run: Run, tmp_path: Path) -> None:
    """It ignores the preload in silence: its work would pass by the gate and nobody would know."""
    compiler = shutil.which("musl-gcc") or "gcc"
    static = compiled(compiler, tmp_path / "static", "-static")
    done = nvshare_run("--", str(static))
    assert (done.returncode, done.stdout.split()[0]) == (0, "plain"), done.stderr
    assert "is linked statically" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_the_system_protects_is_named_where_it_is_protected(nvshare_run: Run, tmp_path: Path) -> None:
    """A setuid program loses the preload, and what it starts too: `nvshare-run -- sudo ...` shares nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    tmp_path.chmod(0o755)
    program = compiled("gcc", tmp_path / "rights")
    shutil.chown(program, NOBODY)
    program.chmod(0o4755)
    done = nvshare_run("--", str(program))
    assert done.returncode == 0, done.stderr
    protected = done.stdout == "plain -\n"  # not on a file system that is mounted nosuid
    assert ("setuid" in done.stderr) == protected, done.stderr
    program.chmod(0o755)
    assert find_obstacle(str(program)) is None


def test_ordinary_programs_meet_no_obstacle(built: Built, tmp_path: Path) -> None:
    """Else every command would begin with a warning that is wrong."""
    ordinary = compiled("gcc", tmp_path / "ordinary")
    loader = next(
        line.split()[0] for line in subprocess.check_output(["ldd", str(ordinary)], text=True).splitlines()[::-1]
    )
    script = tmp_path / "script"
    script.write_text("echo no interpreter line\n")
    for program in (ordinary, "/bin/sh", Path("/proc/self/exe").resolve(), loader, script, tmp_path, tmp_path / "none"):
        assert find_obstacle(str(program)) is None, program


def test_other_machines_programs_are_named(tmp_path: Path) -> None:
    """The loader would say 'wrong ELF class' for every process, which says nothing of what to do."""
    narrow = find_obstacle(str(elf(tmp_path / "narrow", "/lib/ld-linux.so.2", width=NARROW)))
    assert narrow is not None
    assert "is a 32-bit program" in narrow.text
    assert "use a 64-bit build" in narrow.text
    ours = struct.unpack("=H", Path("/proc/self/exe").read_bytes()[18:20])[0]
    foreign = find_obstacle(
        str(elf(tmp_path / "foreign", "/lib/ld-linux.so.3", machine=ARM if ours != ARM else X86_64))
    )
    assert foreign is not None
    assert "another processor" in foreign.text
    musl = find_obstacle(str(elf(tmp_path / "musl", "/lib/ld-musl-x86_64.so.1")))
    assert musl is not None
    assert musl.deadly


@given(st.binary(max_size=200), st.sampled_from([b"", b"#!", b"\x7fELF\x02\x01\x01", b"\x7fELF\x01\x01\x01"]))
def test_no_file_can_break_the_look(tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes) -> None:
    """Else a command with an unusual file would end with a traceback instead of running."""
    path = tmp_path_factory.getbasetemp() / "odd"
    path.write_bytes(start + content)
    path.chmod(stat.S_IRWXU)
    find_obstacle(str(path))


def test_a_script_that_leads_to_itself_ends(tmp_path: Path) -> None:
    """Else nvshare-run would hang where exec says ELOOP."""
    script = tmp_path / "loop"
    script.write_text(f"#!{script}\n")
    assert find_obstacle(str(script)) is None


def test_an_incomplete_installation_is_named_by_its_plain_path(built: Built, tmp_path: Path) -> None:
    """Else glibc's loader would find nothing at `$LIB`, and every program would run without the hook."""
    assert preloadable(built.hook, tmp_path) == built.hook.parent.parent / "$LIB" / HOOK_NAME
    root = tmp_path / "moved"
    shutil.copytree(built.hook.parent.parent, root)
    shutil.rmtree(root / "lib64")
    hook = root / "lib" / HOOK_NAME
    assert preloadable(hook, tmp_path) == hook
    (root / "lib64").mkdir()
    (root / "lib64" / HOOK_NAME).write_bytes(b"another version")
    assert preloadable(hook, tmp_path) == hook


def test_the_hook_is_taken_out_of_an_environment_and_nothing_else() -> None:
    """Else a program for musl would lose preloads of its own."""
    mine = {"LD_PRELOAD": f"/a.so:/x/$LIB/{HOOK_NAME} /b.so", "PATH": "/bin"}
    assert without_hook(mine) == {"LD_PRELOAD": "/a.so:/b.so", "PATH": "/bin"}
    assert without_hook({"LD_PRELOAD": f"/x/{HOOK_NAME}"}) == {}
    assert names_hook_for_glibc_alone(mine)
    assert not names_hook_for_glibc_alone({"LD_PRELOAD": f"/x/$LIB/{HOOK_NAME}:/x/{HOOK_NAME}"})
