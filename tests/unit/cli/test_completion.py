"""The tab key in bash, zsh and fish, each with the script that `nvshare-ctl completion` prints."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Final

import pytest
import typer

from nvshare.coordinator.cli import ctl, ctl_call

BASH: Final = """
source "$FOLDER/script"
read -ra COMP_WORDS <<< "$LINE"
[[ $LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
found=$(complete -p "${COMP_WORDS[0]}")
found=${found#*-F }
${found%% *} "${COMP_WORDS[0]}"
printf '%s\\n' "${COMPREPLY[@]}" > "$FOLDER/offered"
"""
ZSH: Final = """
fpath=($FOLDER $fpath)
autoload -Uz compinit && compinit -u -D
offered() {
    typeset -ga found
    compadd() {
        local -a kept
        if [[ -z ${(M)@[1,${@[(i)(-|--)]}]:#-*[OAD]*} ]]; then builtin compadd -A kept "$@"; found+=($kept); fi
        builtin compadd "$@"
    }
    _main_complete
    print -rl -- $found > $FOLDER/offered
}
zle -C offered complete-word offered
zle-line-init() { BUFFER=$LINE; CURSOR=$#BUFFER; zle offered; BUFFER=exit; zle accept-line }
zle -N zle-line-init
"""


def in_bash(folder: Path, environ: dict[str, str]) -> None:
    """Calls the function that bash would call."""
    subprocess.run(["bash", "--norc", "-c", BASH], env=environ, check=True, timeout=60)


def in_zsh(folder: Path, environ: dict[str, str]) -> None:
    """Presses the tab key in a terminal; the script is autoloaded."""
    (folder / "_nvshare").write_bytes((folder / "script").read_bytes())
    (folder / ".zshrc").write_text(ZSH, encoding="utf-8")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as terminal:
        shell = subprocess.Popen(["zsh", "-d", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO: the shell has ended
            while terminal.read(4096):
                pass
        assert shell.wait(60) == 0


def in_fish(folder: Path, environ: dict[str, str]) -> None:
    """Asks fish itself."""
    code = f"source $FOLDER/script; complete -C {shlex.quote(environ['LINE'])} | cut -f1 > $FOLDER/offered"
    subprocess.run(["fish", "-N", "-c", code], env=environ, check=True, timeout=60)


SHELLS: Final[dict[str, Callable[[Path, dict[str, str]], None]]] = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}


OFFERED: Final = {
    "nvshare-ctl set policy fair": {"fair_share"},
    "nvshare-run --mem": {"--memory"},
    "nvshare-run --memory s": {"swap"},
    "nvshare-run --gang x mktem": {"mktemp"},
    "nvshare-coordinator --switch": {"--switch-share"},
}


@pytest.mark.parametrize(
    ("shell", "line"), [*(("bash", line) for line in OFFERED), *product(("zsh", "fish"), list(OFFERED)[:2])]
)
def test_the_tab_key_completes(shell: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the tab key offers nothing, or the wrong words."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    with pytest.raises(SystemExit):
        ctl.main(["completion", shell])
    (tmp_path / "script").write_text(capsys.readouterr().out, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "FOLDER": str(tmp_path), "ZDOTDIR": str(tmp_path), "LINE": line}
    SHELLS[shell](tmp_path, {**environ, "HOME": str(tmp_path), "TERM": "dumb"})
    assert set((tmp_path / "offered").read_text(encoding="utf-8").split()) == OFFERED[line]


def test_it_offers_the_programs_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: no names behind `nvshare-ctl pause`, or a traceback there where no coordinator runs."""
    context = typer.Context(typer.main.get_command(ctl.app))
    context.params["where"] = Path("/nowhere")
    assert ctl_call.complete_client(context) == []
    status = {"clients": [{"name": name} for name in ("train", "serve", "train")]}
    monkeypatch.setattr(ctl_call, "call", lambda *_: status)
    assert ctl_call.complete_client(context) == ["serve", "train"]
