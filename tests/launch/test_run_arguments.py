"""How nvshare-run reads its command line."""

from __future__ import annotations

import pytest

from nvshare.coordinator.cli import run


@pytest.mark.parametrize(
    ("argv", "ours", "command"),
    [
        (["--", "python", "x.py", "--name", "a"], [], ["python", "x.py", "--name", "a"]),
        (["python", "x.py", "--priority", "3"], [], ["python", "x.py", "--priority", "3"]),
        (["--name", "job", "python"], ["--name", "job"], ["python"]),
        (["--name=job", "--simulate", "python", "-c", "1"], ["--name=job", "--simulate"], ["python", "-c", "1"]),
        (["--simulate=2x8GiB", "--", "--odd"], ["--simulate=2x8GiB"], ["--odd"]),
        (["--", "--", "x"], [], ["--", "x"]),
        (["--simulate", "--memory", "device", "env"], ["--simulate", "--memory", "device"], ["env"]),
        ([], [], []),
    ],
)
def test_the_command_is_told_from_our_options(argv: list[str], ours: list[str], command: list[str]) -> None:
    """Else an option of the command would be taken for ours, or `--simulate` would swallow the command."""
    assert run.split_command(argv) == (ours, command)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "no command"),
        (["--priority", "high", "--", "true"], "whole number"),
        (["--priority", "99999999999", "--", "true"], "out of range"),
        (["--weight", "0", "--", "true"], "from 1 to 10000"),
        (["--weight", "1e3", "--", "true"], "from 1 to 10000"),
        (["--gang", "x" * 64, "--", "true"], "1 to 63 bytes"),
        (["--gpu-memory-limit", "many", "--", "true"], "is no size"),
        (["--memory", "fast", "--", "true"], "invalid choice"),
        (["--name", "x" * 64, "--", "true"], "1 to 63 bytes"),
        (["--nmae", "x", "--", "true"], "--nmae"),
        (["--simulate", "2x8GiB", "--", "true"], "--simulate=2x8GiB"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a typing mistake would run the command with something else than was asked for."""
    with pytest.raises(SystemExit) as ended:
        run.main(argv)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
