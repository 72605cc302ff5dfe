"""`nvshare-install-library`: versions on the node's file system, what is kept and what goes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nvshare.client_hook.launcher import HOOK_NAME
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.node.allocation import new_slot
from nvshare.coordinator.kubernetes.node.library import InstallError
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.device_ids import SlotId


def hook(directory: Path, content: bytes) -> Path:
    """A library to install."""
    path = directory / "built" / HOOK_NAME
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def versions(directory: Path) -> set[str]:
    """Installed versions; asserts that nothing half-made lies there."""
    found = {place.name for place in directory.iterdir()} - {".lock", library.CURRENT}
    assert not [name for name in found if name.startswith(".")]
    return found


def test_every_glibc_finds_the_same_file(tmp_path: Path) -> None:
    """Else `$LIB` in LD_PRELOAD leads nowhere on one distribution, and its pods run without the hook."""
    mask = os.umask(0o077)
    try:
        name = library.install(hook(tmp_path, b"one"), tmp_path / "lib", None)
    finally:
        os.umask(mask)
    place = tmp_path / "lib" / name
    assert library.current(tmp_path / "lib") == name
    for folder in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "."):
        assert (place / folder / HOOK_NAME).read_bytes() == b"one"
    assert (place / library.PRELOAD).read_text() == "/opt/nvshare/lib/libnvshare_hook.so\n"
    files = (place / library.LIBRARY, place / library.PRELOAD)
    for path, mode in ((place, 0o755), (place / "lib", 0o755), *((file, 0o644) for file in files)):
        assert stat.S_IMODE(path.stat().st_mode) == mode  # containers of any user read it, whatever our umask


def test_versions_in_use_stay_and_others_go(tmp_path: Path) -> None:
    """Else a container that starts again loses its library, or a node fills with libraries."""
    target, slots_dir = tmp_path / "lib", tmp_path / "slots"
    slots_dir.mkdir()
    names = [library.install(hook(tmp_path, b"0"), target, slots_dir)]
    slot = new_slot([SlotId("GPU-a", 0)], names[0])
    slots.write(slots_dir, slot)
    names += [library.install(hook(tmp_path, content), target, slots_dir) for content in (b"1", b"2", b"3")]
    assert versions(target) == {names[0], names[2], names[3]}  # used, the one before, current
    slots.remove(slots_dir, slot.slot)
    again = library.install(hook(tmp_path, b"3"), target, slots_dir)
    assert again == names[3] == library.current(target)
    assert library.install(hook(tmp_path, b"0"), target, slots_dir) == names[0]  # a rollback
    assert library.current(target) == names[0]
    assert versions(target) == {names[0], names[3]}


@pytest.mark.parametrize("known", ["no directory", "a slot made again", "not told"])
def test_nothing_goes_while_nobody_knows_what_is_used(tmp_path: Path, known: str) -> None:
    """Else the start of a node, when /run is empty, takes the libraries away that the kubelet's memory names."""
    target, slots_dir = tmp_path / "lib", tmp_path / "slots"
    if known == "a slot made again":
        slots_dir.mkdir()
        slots.write(slots_dir, new_slot([SlotId("GPU-a", 0)], ""))
    told = None if known == "not told" else slots_dir
    names = {library.install(hook(tmp_path, content), target, told) for content in (b"0", b"1", b"2", b"3")}
    assert versions(target) == names


@pytest.mark.parametrize("file", [library.LIBRARY, library.PRELOAD])
def test_a_torn_version_is_replaced(tmp_path: Path, file: str) -> None:
    """Else a node that crashed while installing has a broken library for ever."""
    target = tmp_path / "lib"
    name = library.install(hook(tmp_path, b"whole"), target, None)
    whole = (target / name / file).read_bytes()
    (target / name / file).write_bytes(b"")
    assert library.install(hook(tmp_path, b"whole"), target, None) == name
    assert (target / name / file).read_bytes() == whole


def test_a_version_without_its_preload_is_not_given_out(tmp_path: Path) -> None:
    """Broken: containers of a version from before the file have no hook and run out of turn."""
    target = tmp_path / "lib"
    name = library.install(hook(tmp_path, b"old"), target, None)
    (target / name / library.PRELOAD).unlink()
    assert library.current(target) is None


def test_a_file_system_without_execution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every pod warns that it cannot load the library, and none waits for its turn."""
    real = os.statvfs(tmp_path)
    values = list(real[:10])
    values[8] |= os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    with pytest.raises(InstallError, match="mounted noexec"):
        library.install(hook(tmp_path, b"x"), tmp_path / "lib", None)


def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else an init container fails without a reason."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        library.main(["--to", str(tmp_path / "file" / "lib")])
    assert ended.value.code == 1
    assert "Not a directory; choose another --to" in capsys.readouterr().err
