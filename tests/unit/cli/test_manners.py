"""Versions, typing mistakes, manual pages, and the files that the package prints."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nvshare.coordinator.cli import ctl, run
from nvshare.coordinator.daemon import main as coordinator
from nvshare.coordinator.daemon import settings_file
from nvshare.coordinator.model.settings import CONFIGURED
from nvshare.coordinator.system.version import version

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_command_says_its_version_and_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a report of a fault cannot say which version it is about, or a tool cannot say what it does."""
    module, function = SCRIPTS[name].split(":")
    before = signal.getsignal(signal.SIGTERM)
    for option, said in (("--version", f"{name} {version()}\n"), ("--help", "usage")):
        monkeypatch.setattr(sys, "argv", [name, option])
        try:
            with pytest.raises(SystemExit) as ended:
                getattr(importlib.import_module(module), function)()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert not ended.value.code
        assert said in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('quantum = "5ms"\n[gpu."GPU-x"]\npolicy = "priority"\n', 0, "settings are valid"),
        ('quantm = "5ms"\n', 2, "did you mean quantum?"),
        ('policy = "nobody"\n', 2, "no policy 'nobody'"),
        ('[gpu."GPU-x"]\npolicy = "nobody"\n', 2, "no policy 'nobody'"),
        ("quantum =", 2, "not TOML"),
        ('policy = "nobody"\nquantm = "5ms"\n', 2, "no policy 'nobody'"),
        ('policy = "nobody"\nquantm = "5ms"\n', 2, "did you mean quantum?"),
        ('metrics_port = 0\nmetrics_tls_dir = "/none"\n', 2, "/none: no usable tls.crt"),
        ('metrics_port = 0\nmetrics_address = "no address"\n', 2, "metrics_address: no address: "),
        ('web_port = 0\nweb_token_file = "/none"\n', 2, "--web-token-file: /none: "),
    ],
)
def test_the_configuration_is_checked_without_a_start(
    text: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a mistake in a file shows when the service is restarted, and the supervisor restarts it for ever."""
    (tmp_path / "nvshare.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        coordinator.main(["--check-config", "--config", str(tmp_path / "nvshare.toml")])
    printed = capsys.readouterr()
    assert (ended.value.code, said in printed.out + printed.err) == (code, True), printed


def test_a_mistyped_option_of_nvshare_run_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a user looks for the right name by oneself."""
    for words, said in ((["--memor", "swap"], "did you mean --memory?"), (["--zzzz"], "see nvshare-run --help")):
        with pytest.raises(SystemExit) as ended:
            run.main([*words, "--", "true"])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_nvshare_run_says_where_the_variable_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a user believes that NVSHARE_ENABLE=1 works in an environment without nvshare."""
    (tmp_path / "lib" / "python3.12" / "site-packages").mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    for value, says in (("1", True), ("0", False)):
        monkeypatch.setenv("NVSHARE_ENABLE", value)
        run.note_environment(str(python))
        assert (f"nvshare is not installed in {tmp_path}" in capsys.readouterr().err) is says


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Output of `nvshare-ctl`."""
    with pytest.raises(SystemExit) as ended:
        ctl.main(words)
    assert not ended.value.code
    return capsys.readouterr().out


def test_units_start_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the unit starts another program, or none."""
    for words in ((), ("system",), ("user",)):
        unit = printed(capsys, "install", "unit", *words)
        assert f"ExecStart={Path(sys.executable).parent}/nvshare-coordinator --config " in unit
        assert "RestartPreventExitStatus=2" in unit
        assert printed(capsys, "install-unit", *words) == unit  # the name of earlier versions


@pytest.mark.parametrize("unit", ["system", "user"])
def test_systemd_takes_the_units(unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: systemd ignores a line of a unit, or the system's service has more rights than it needs."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "nvshare.service"
    file.write_text(printed(capsys, "install", "unit", unit), encoding="utf-8")
    scope = ["--user"] if unit == "user" else []
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"}
    checks = [["verify", str(file)]]
    if unit == "system":  # of ten; without a sandbox 9.6
        checks.append(["security", "--offline=true", "--threshold=40", str(file)])
    for check in checks:
        words = [analyze, *scope, *check]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "nvshare.service" not in done.stderr, done.stderr


def test_the_sandbox_leaves_what_the_coordinator_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the service cannot see cards or processes, its locks are its own, or containers lose its directory."""
    for name in ("system", "user"):
        lines = dict(
            line.split("=", 1) for line in printed(capsys, "install", "unit", name).splitlines() if "=" in line[:40]
        )
        assert lines["Type"] == "notify"
        assert lines["RuntimeDirectoryPreserve"] == "yes"
        hidden = {"PrivateNetwork", "PrivateUsers", "PrivateDevices", "PrivateIPC", "ProtectProc", "ProcSubset"}
        assert not hidden & set(lines)  # abstract sockets, users, cards, /dev/shm, /proc
        if name == "user":  # the driver makes device nodes by a setuid program
            assert not [key for key in lines if key.startswith(("NoNew", "Restrict")) and "Restart" not in key]
    system = printed(capsys, "install", "unit")
    assert "DeviceAllow=char-nvidia* rwm" in system
    assert {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_MKNOD", "CAP_SETUID"} <= set(system.replace("=", " ").split())


def test_the_sample_configuration_has_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the sample lacks a setting, or shows another default than the coordinator's."""
    sample = printed(capsys, "install", "unit", "config")
    lines = [line.removeprefix("# ") for line in sample.splitlines() if re.match(r"# (\w+ = |\[gpu)", line)]
    written = tomllib.loads("\n".join(lines))
    assert set(written) == {*CONFIGURED, "gpu"}
    without = {key for key in written if key.endswith(("_port", "_file", "_dir", "_command"))}
    without |= {"capacity", "host_budget", "gpu"}
    path = tmp_path / "nvshare.toml"
    path.write_text(
        "\n".join(
            line
            for line in lines[: lines.index(next(s for s in lines if s.startswith("[")))]
            if line.split()[0] not in without
        )
    )
    assert settings_file.load({}, {}, path) == settings_file.load({}, {})
    path.write_text("\n".join(lines))
    settings_file.load({}, {}, path)


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        ([], []),
        (["--mps"], ["--mps=same_user"]),
        (["--mps", "off"], ["--mps", "off"]),
        (["--simulate", "--mps", "--embedded"], ["--simulate=", "--mps=same_user", "--embedded"]),
    ],
)
def test_the_coordinator_takes_options_without_values(
    words: list[str], parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: `nvshare-coordinator` alone, or `--mps` alone, is a wrong command line."""
    seen: list[str] = []
    monkeypatch.setattr(coordinator, "run_command", lambda _app, given, _name, **_: seen.extend(given))
    with pytest.raises(SystemExit):
        coordinator.main(words)
    assert seen == parsed


def test_no_color_is_honoured() -> None:
    """Broken: colours where the user wants none."""
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "1"}
    code = "from nvshare.coordinator.cli.ctl import main; main(['doctor', '-h'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert not re.search(r"\x1b\[(\d+;)*(3|4|9)\d", done.stdout)
