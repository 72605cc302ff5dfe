"""Settings: precedence, bounds, and mistakes that name themselves."""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from nvshare.coordinator.cli import ctl_call, ctl_settings
from nvshare.coordinator.daemon import main
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.live_settings import LiveSettings
from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.control.server import Administration
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.settings_file import SettingsError, capacity_bytes, live_values, load, sample
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kinds import DURATION, setting
from nvshare.coordinator.model import events
from nvshare.coordinator.model import settings as model
from nvshare.coordinator.model.settings import CONFIGURED, OverdueAction, Settings, Sharing
from nvshare.coordinator.system.devices import Device
from nvshare.scheduler_policies import registry
from tests.docs import generated

GPU = "GPU-5a1c"


def mistakes(
    flags: dict[str, object] | None = None, env: dict[str, str] | None = None, file: Path | None = None
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(flags or {}, env or {}, file)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("card_gib", "expected_mib"), [(140, 137 << 10), (80, 77 << 10 | 512), (8, 7 << 10 | 512)])
def test_a_card_has_room_for_contexts(card_gib: int, expected_mib: int) -> None:
    """Broken: once a program has filled the card, no other can start: its context is out of memory."""
    card = Device(0, "GPU-a", "card", card_gib << 30)
    assert capacity_bytes(Settings(), card, real=True) == expected_mib << 20
    assert capacity_bytes(Settings(), card, real=False) == card_gib << 30
    assert capacity_bytes(load({}, {"NVSHARE_CAPACITY": "9GiB"}), card, real=True) == 9 << 30


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    """Broken if the order of precedence were another, or NVSHARE_CONFIG named no file."""
    file = tmp_path / "settings.toml"
    file.write_text('quantum = "1s"\ncapacity = "1GiB"\npolicy = "priority"\nmax_clients = 7\n')
    variables = {"NVSHARE_QUANTUM": "2s", "NVSHARE_CAPACITY": "2GiB"}
    settings = load({"quantum": "3s"}, variables, file)
    assert settings == load({"quantum": "3s"}, variables | {"NVSHARE_CONFIG": str(file)})
    assert settings.quantum_ns == 3_000_000_000
    assert settings.capacity_bytes == 2 << 30
    assert (settings.policy, settings.max_clients) == ("priority", 7)


def test_every_kind_of_value_is_read_from_every_source(tmp_path: Path) -> None:
    """Broken if a setting worked in one place only."""
    values = {
        "policy": "priority",
        "quantum": "auto",
        "sharing": "concurrent",
        "capacity": "512MiB",
        "switch_share": "2%",
        "longest_wait": "9s",
        "host_budget": "8GiB",
        "drain_deadline": "3s",
        "pacing_budget": "0",
        "idle_release": "0",
        "overdue_action": "demote",
        "metrics_port": "9400",
        "log_level": "debug",
    }
    file = tmp_path / "settings.toml"
    file.write_text("\n".join(f"{k} = {v}" if v.isdecimal() else f'{k} = "{v}"' for k, v in values.items()))
    from_file = load({}, {}, file)
    assert from_file == load({}, {"NVSHARE_" + key.upper(): value for key, value in values.items()})
    assert from_file.quantum_ns is None
    assert from_file.longest_wait_ns == 9_000_000_000
    assert (from_file.switch_share, from_file.host_budget_bytes) == (0.02, 8 << 30)
    assert (from_file.pacing_budget_ns, from_file.idle_release_ns) == (0, 0)
    assert from_file.overdue_action is OverdueAction.DEMOTE
    assert (from_file.sharing, from_file.metrics_port) == (Sharing.CONCURRENT, 9400)


def test_a_clients_variable_is_no_setting() -> None:
    """Broken if a coordinator did not start below an MPS client, or took the client's mark for a permission."""
    assert load({}, {"NVSHARE_MPS": "1"}).mps == "off"
    assert load({}, {"NVSHARE_MPS": "same_user"}).mps == "same_user"
    with pytest.raises(SettingsError, match="--mps: 'yes' is none of off, same_user"):
        load({"mps": "yes"}, {})


def test_all_mistakes_are_told_at_once_with_where_they_stand(tmp_path: Path) -> None:
    """Broken if an operator had to fix one mistake to learn of the next."""
    file = tmp_path / "settings.toml"
    file.write_text('quantm = "1s"\ncapacity = "-3"\n[gpu."GPU-1"]\nshare = "x"\nquantum = 5\n')
    told = mistakes({"sharing": "perhaps"}, {"NVSHARE_MAX_CLIENTS": "0"}, file)
    assert len(told) == 6
    assert f"{file}: quantm: no such setting; did you mean quantum?" in told
    assert any(line.startswith(f"{file}: capacity: '-3' is not a size") for line in told)
    assert any(line.startswith("--sharing: 'perhaps'") for line in told)
    assert any(line.startswith("NVSHARE_MAX_CLIENTS: ") for line in told)
    assert any("gpu.GPU-1.share: no such setting" in line and "sharing" in line for line in told)
    assert any("gpu.GPU-1.quantum: 5 is not text" in line for line in told)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"quantum": "0ms"}, "--quantum"),
        ({"quantum": "2h"}, "1ms to 1h"),
        ({"quantum": "10"}, "100ms"),
        ({"idle_release": "2"}, "not a duration"),
        ({"pacing_budget": False}, '"0"'),
        ({"drain_deadline": "0"}, "100ms"),
        ({"capacity": "0"}, "more than 0"),
        ({"switch_share": "70%"}, "--switch-share"),
        ({"host_budget": "0"}, "--host-budget"),
        ({"metrics_port": 70_000}, "--metrics-port"),
        ({"log_level": "loud"}, "debug, info, warning, error"),
        ({"overdue_action": "shout"}, "nothing, demote, kill"),
        ({"policy": ""}, "--policy"),
        ({"share_by": "group"}, "--share-by"),
        ({"max_weight": 0}, "--max-weight"),
        ({"max_weight": 10_001}, "--max-weight"),
        ({"max_priority": 1 << 31}, "--max-priority"),
    ],
)
def test_values_out_of_bounds_are_refused(flags: dict[str, object], said: str) -> None:
    """Broken if a value that cannot work was accepted, or its refusal did not help."""
    (told,) = mistakes(flags)
    assert said in told


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Broken if a wrong path or syntax gave a traceback."""
    assert "give a readable file with --config" in mistakes(file=tmp_path / "none.toml")[0]
    (tmp_path / "bad.toml").write_text("= =")
    assert "not TOML" in mistakes(file=tmp_path / "bad.toml")[0]
    for number, text in enumerate(
        ("max_weight = " + "9" * 5000, "a = " + "[" * 3000 + "]" * 3000)
    ):  # no TOMLDecodeError
        (tmp_path / f"{number}.toml").write_text(text)
        assert "not TOML" in mistakes(file=tmp_path / f"{number}.toml")[0]
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not TOML" in mistakes(file=tmp_path / "bytes.toml")[0]


def test_a_misspelt_variable_is_named_and_others_are_left_alone() -> None:
    """Broken if a typo were without effect, or a client's variable stopped the coordinator."""
    (told,) = mistakes(env={"NVSHARE_QUANTUN": "1s"})
    assert told == "NVSHARE_QUANTUN: no such setting; did you mean NVSHARE_QUANTUM?"
    clients = ("SOCKET", "MEMORY", "MEMORY_LIMIT", "PRIORITY", "NAME", "ON_LOSS", "LOSS_TIMEOUT", "LOG")
    more = ("LOG_FILE", "DISABLE", "ENABLE", "SIMULATE", "SIM_STATE", "HOOK_LIBRARY", "RUNTIME_DIR")
    assert load({}, {"NVSHARE_" + name: "1" for name in clients + more}) == Settings()


def test_one_gpu_can_differ(tmp_path: Path) -> None:
    """Broken if `auto` for one GPU could not be told from no quantum at all."""
    file = tmp_path / "settings.toml"
    file.write_text('[gpu."GPU-a"]\nquantum = "auto"\n[gpu."GPU-b"]\ncapacity = "1GiB"\n')
    gpus = load({}, {}, file).gpu
    assert gpus == {"GPU-a": {"quantum_ns": None}, "GPU-b": {"capacity_bytes": 1 << 30}}


def test_a_setting_is_one_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a new setting needs a second place, and somebody forgets it."""
    nap = setting(DURATION, 3_000_000_000, by_gpu=True, live=True, help="How long a GPU naps")
    record = make_dataclass("More", [("nap_ns", int, nap)], bases=(Settings,), frozen=True, slots=True, kw_only=True)
    monkeypatch.setattr(model, "Settings", record)
    for table in (CONFIGURED, model.SETTINGS):
        monkeypatch.setitem(table, "nap", model.declared(record)["nap"])

    file = tmp_path / "nvshare.toml"
    file.write_text(f'nap = "5s"\n[gpu."{GPU}"]\nnap = "6s"\n')
    configured: Any = load({}, {}, file)
    assert (configured.nap_ns, configured.gpu) == (5_000_000_000, {GPU: {"nap_ns": 6_000_000_000}})
    assert load({}, {"NVSHARE_NAP": "4s"}).nap_ns == 4_000_000_000  # type: ignore[attr-defined]
    assert "NVSHARE_NAP: '4' is not a duration" in mistakes(env={"NVSHARE_NAP": "4"})[0]
    assert '# nap = "3s"\n' in sample()
    assert "| `nap` | `3s` | yes | How long a GPU naps |" in generated.settings_table()
    schema = json.loads(generated.chart_schema())
    for part in (schema["properties"]["settings"], schema["definitions"]["gpuOverride"]):
        assert part["properties"]["nap"] == {"$ref": "#/definitions/duration"}

    def coordinator(context: typer.Context, **flags: object) -> None:
        given.append(flags["nap"])

    app, ctl, given = typer.Typer(), typer.Typer(), list[object]()
    app.command()(main.with_settings(coordinator))
    app(["--nap=7s"], standalone_mode=False)
    assert given == ["7s"]

    scheduler = Scheduler(registry.create, configured)
    scheduler.handle(events.GpuAdded(GPU, "card", 1 << 30, 1 << 30), 1)
    rights = Rights(0, 0, 1, hide_other_users=False)
    dispatcher = Dispatcher(scheduler, None, None, rights, max_clients=1)  # type: ignore[arg-type]
    devices, live = [Device(0, GPU, "card", 1 << 30)], LiveSettings(tmp_path / "live")
    values = partial(live_values, configured, devices)
    server = Administration(dispatcher, devices, registry.create, {}, live, values, list, rights)

    def call(directory: object, request: api.Request) -> Any:
        return api.decode_reply(server.answer(api.encode_request(request), 0, 5))

    monkeypatch.setattr(ctl_call, "call", call)
    ctl_settings.register(ctl)
    ctl(["set", "nap", "8s"], standalone_mode=False)
    assert "nap is 8s on GPU 0" in capsys.readouterr().out
    assert scheduler.settings.nap_ns == 8_000_000_000  # type: ignore[attr-defined]
    assert LiveSettings(tmp_path / "live").node() == {("nap", GPU): 8_000_000_000}
    ctl(["unset", "nap"], standalone_mode=False)
    assert "nap: 8s" in capsys.readouterr().out
    assert scheduler._node.gpus[GPU].settings.nap_ns == 6_000_000_000  # type: ignore[attr-defined]
