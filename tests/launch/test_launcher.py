"""The environment that puts a program under the hook: pure functions, no process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.client_hook import launcher
from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.model.profile import MEMORY_MODES

HOOK = Path("/opt/nvshare/libnvshare_hook.so")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", str(HOOK)),
        ("/lib/a.so", f"/lib/a.so:{HOOK}"),
        ("/lib/a.so /lib/b.so", f"/lib/a.so:/lib/b.so:{HOOK}"),
        (f"{HOOK}:/lib/a.so", f"/lib/a.so:{HOOK}"),
        ("/old/libnvshare_hook.so", str(HOOK)),
    ],
)
def test_preload_keeps_other_entries_and_names_the_hook_once(before: str, after: str) -> None:
    """Else a program loses its own preloads, which the hook would not call, or loads two hooks."""
    assert launcher.with_preload(before, HOOK) == after


@given(st.lists(st.sampled_from(["/a.so", "/b.so", str(HOOK), "/x/libtsan.so.2"]), max_size=6), st.sampled_from(": "))
def test_preload_is_idempotent(entries: list[str], separator: str) -> None:
    """Else a program that starts a program under the hook grows LD_PRELOAD each time."""
    once = launcher.with_preload(separator.join(entries), HOOK)
    assert launcher.with_preload(once, HOOK) == once
    assert launcher.preload_entries(once).count(str(HOOK)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/opt/nvshare/lib/libnvshare_hook.so\n", True),
        ("/lib/a.so:/lib/b.so\n/c/libnvshare_hook.so /d.so", True),
        ("/lib/libnvshare_hook.so.1\n", False),
        (None, False),
    ],
)
def test_a_hook_of_the_whole_container_is_noticed(tmp_path: Path, text: str | None, expected: bool) -> None:
    """Broken: a program of nvshare-run in a container with a slot has two hooks, or elsewhere none."""
    file = tmp_path / "ld.so.preload"
    if text is not None:
        file.write_text(text)
    assert launcher.is_in_every_program(str(file)) is expected


def test_environment_of_a_client_names_the_coordinator_and_what_was_asked_for(tmp_path: Path) -> None:
    """Else the hook finds no coordinator, or the user's options get lost on the way."""
    base = {"PATH": "/bin", "NVSHARE_MEMORY": "managed", "NVSHARE_ON_LOSS": "run"}
    options = {"memory": "device", "name": "train", "share_limit": "55%", "park_after": "0"}
    made = launcher.client_environment(base, hook=HOOK, runtime_dir=tmp_path, options=options)
    assert made == {
        "PATH": "/bin",
        "LD_PRELOAD": str(HOOK),
        "ASAN_OPTIONS": "verify_asan_link_order=0",
        "NVSHARE_RUNTIME_DIR": str(tmp_path),
        "NVSHARE_SOCKET": f"{tmp_path}/hooks.sock",
        "NVSHARE_MEMORY": "device",
        "NVSHARE_NAME": "train",
        "NVSHARE_SHARE_LIMIT": "55%",
        "NVSHARE_PARK_AFTER": "0",
        "NVSHARE_ON_LOSS": "run",
    }
    assert base["NVSHARE_MEMORY"] == "managed"


def test_options_that_were_not_given_leave_the_environment_alone(tmp_path: Path) -> None:
    """Else `NVSHARE_MEMORY=device nvshare-run ...` would be overruled by a default."""
    base = {"NVSHARE_MEMORY": "device", "NVSHARE_PRIORITY": "7"}
    made = launcher.client_environment(base, hook=HOOK, runtime_dir=tmp_path, options={})
    assert (made["NVSHARE_MEMORY"], made["NVSHARE_PRIORITY"]) == ("device", "7")
    assert "NVSHARE_NAME" not in made


def test_a_coordinator_is_not_its_own_client() -> None:
    """Else the coordinator would wait for a lease that only it can grant, or start itself again for ever."""
    made = launcher.coordinator_environment(
        {
            "LD_PRELOAD": f"{HOOK}:/lib/a.so",
            "NVSHARE_ENABLE": "1",
            "NVSHARE_SOCKET": "/s",
            "NVSHARE_NAME": "job",
            "NVSHARE_QUANTUM": "20ms",
        }
    )
    assert made["LD_PRELOAD"] == "/lib/a.so"
    assert {name for name in made if name.startswith("NVSHARE_")} == {"NVSHARE_QUANTUM"}
    assert "LD_PRELOAD" not in launcher.coordinator_environment({"LD_PRELOAD": str(HOOK)})


@pytest.mark.parametrize("folder", ["my projects", "a:b"])
def test_a_hook_whose_path_ld_preload_cannot_name_is_linked(tmp_path: Path, folder: str) -> None:
    """Else a checkout below `My Projects` would silently run without the hook."""
    hook = tmp_path / folder / launcher.HOOK_NAME
    hook.parent.mkdir()
    hook.write_bytes(b"library")
    runtime = tmp_path / "run"
    runtime.mkdir()
    for _ in range(2):
        link = launcher.preloadable(hook, runtime)
        assert link == runtime / launcher.HOOK_NAME
        assert link.read_bytes() == b"library"
    assert sorted(path.name for path in runtime.iterdir()) == [launcher.HOOK_NAME]


def test_a_link_to_an_older_hook_is_replaced(tmp_path: Path) -> None:
    """Else an upgraded installation would go on with the old library."""
    hook = tmp_path / "new one.so"
    hook.write_bytes(b"new")
    (tmp_path / launcher.HOOK_NAME).symlink_to("/gone.so")
    assert launcher.preloadable(hook, tmp_path).read_bytes() == b"new"


def test_no_usable_path_at_all_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """Else the dynamic linker would print a riddle and the program would run unhooked."""
    with pytest.raises(LaunchError, match="--runtime-dir"):
        launcher.preloadable(Path("/my hook/libnvshare_hook.so"), tmp_path / "with space")


def test_the_named_hook_wins_and_must_exist(tmp_path: Path) -> None:
    """Else a typing mistake in NVSHARE_HOOK_LIBRARY would run the program unhooked."""
    named = tmp_path / "hook.so"
    with pytest.raises(LaunchError, match="does not exist"):
        launcher.find_hook({"NVSHARE_HOOK_LIBRARY": str(named)})
    named.touch()
    assert launcher.find_hook({"NVSHARE_HOOK_LIBRARY": str(named)}) == named


def test_memory_modes_that_do_not_exist_are_refused() -> None:
    """Else the program would run in another mode than was asked for."""
    for mode in MEMORY_MODES:
        launcher.check_memory_mode(mode)
    with pytest.raises(LaunchError, match="unknown memory mode 'fast'"):
        launcher.check_memory_mode("fast")
