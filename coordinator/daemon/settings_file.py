"""The configured values of the settings: from a file, the environment and flags, validated once.

Invariants: flags take precedence over environment, file and defaults, in this order.  All mistakes are reported at
once, each with its source (file and key, variable, flag).  An unknown key is a mistake, reported with the nearest
known name.

Non-goals: which settings there are, and their bounds (model/settings.py).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.kinds import POLICY, Kind, Setting, Value
from nvshare.coordinator.model import settings as model
from nvshare.coordinator.model.settings import CONFIGURED, Settings
from nvshare.coordinator.system.devices import Device
from nvshare.coordinator.system.host_memory import SHARE, default_budget_bytes
from nvshare.coordinator.system.web_process import check_installed, read_token
from nvshare.scheduler_policies import registry

Key = tuple[str, str | None]
"""A setting's name, and its GPU or None."""
MIB: Final = 1 << 20


class SettingsError(Exception):
    """Faulty settings; the text has one line for each mistake."""


class StartError(Exception):
    """The coordinator cannot start; the text names the remedy."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


# --- reading ----------------------------------------------------------------------------------------------------------


def load(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    """Merges and validates.  `flags` are by file key; None means not given.  Raises SettingsError."""
    env = os.environ if environment is None else environment
    mistakes: list[str] = []
    if file is None and env.get("NVSHARE_CONFIG"):
        file = Path(env["NVSHARE_CONFIG"])
    given = {} if file is None else _from_file(file, mistakes)
    given |= _from_environment(env, mistakes)
    given |= {key: ("--" + key.replace("_", "-"), value) for key, value in flags.items() if value is not None}
    of_gpus = given.pop("gpu", ("", {}))
    values = _read(given, CONFIGURED, mistakes)
    values["gpu"] = _read_gpus(*of_gpus, mistakes)
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return model.Settings(**values)


def _read(given: Mapping[str, tuple[str, object]], known: Mapping[str, Setting], mistakes: list[str]) -> dict[str, Any]:
    """The fields of a record from `key: (source, raw value)`."""
    found = {}
    for key, (source, raw) in given.items():
        if key not in known:
            mistakes.append(f"{source}: no such setting{_hint(key, known)}")
            continue
        try:
            found[known[key].field] = known[key].kind.typed(_value(known[key].kind, raw))
        except ValueError as error:
            mistakes.append(f"{source}: {error}")
    return found


def _value(kind: Kind, raw: object) -> Value:
    value = kind.read(raw)
    if kind is POLICY and value not in (offered := registry.offers()):
        raise ValueError(f"no policy {value!r}; known: {', '.join(offered)}")
    return value


def _read_gpus(source: str, tables: object, mistakes: list[str]) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        mistakes.append(f'{source}: write the settings of a GPU below [gpu."GPU-..."]')
        return {}
    known = {key: setting for key, setting in CONFIGURED.items() if setting.by_gpu}
    return {
        uuid: _read({key: (f"{source}.{uuid}.{key}", raw) for key, raw in table.items()}, known, mistakes)
        for uuid, table in tables.items()
    }


def _from_file(file: Path, mistakes: list[str]) -> dict[str, tuple[str, object]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        mistakes.append(f"{file}: {error.strerror}; give a readable file with --config")
        return {}
    except (ValueError, RecursionError) as error:
        mistakes.append(f"{file}: not TOML: {error}")
        return {}
    return {key: (f"{file}: {key}", value) for key, value in content.items()}


def _from_environment(env: Mapping[str, str], mistakes: list[str]) -> dict[str, tuple[str, object]]:
    """Reads the variables of settings.  Others with the prefix may be the clients' and are ignored."""
    variables = {"NVSHARE_" + key.upper(): key for key in CONFIGURED}
    found: dict[str, tuple[str, object]] = {}
    for variable, key in variables.items():
        text = env.get(variable)
        if text and not (variable == "NVSHARE_MPS" and text in ("0", "1")):  # a client's: whether it joined
            found[key] = (variable, text)
    for variable in env:
        if variable.startswith("NVSHARE_") and variable not in variables:
            near = difflib.get_close_matches(variable, variables, 1, 0.9)
            if near and variable not in _CLIENT_VARIABLES:
                mistakes.append(f"{variable}: no such setting; did you mean {near[0]}?")
    return found


_CLIENT_VARIABLES: Final = frozenset({"NVSHARE_SIMULATE", "NVSHARE_MEMORY", "NVSHARE_LOG", "NVSHARE_LOG_FILE"})


def _hint(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def words(kind: Kind) -> list[str]:
    """The values of a choice, to complete one."""
    return list(registry.offers()) if kind is POLICY else [kind.show(word) for word in kind.words]


def sample() -> str:
    """A file with every setting as a comment."""
    lines = []
    for key, setting in CONFIGURED.items():
        if setting.chapter:
            lines += ["", f"# {setting.chapter}"]
        mark = '"' if setting.kind.quoted else ""
        lines.append(f"# {key} = {setting.sample or mark + setting.default_shown + mark}")
    return _SAMPLE.format("\n".join(lines))


_SAMPLE: Final = """\
# Settings of nvshare-coordinator.  Each line shows a default.  `nvshare-coordinator --check-config --config FILE`
# checks the file, and SIGHUP makes a running coordinator read it again.
{}

# One GPU's own settings; `nvidia-smi -L` shows the names
# [gpu."GPU-5a1c0000-0000-0000-0000-000000000000"]
# quantum = "20ms"
"""


# --- what a machine makes of them -------------------------------------------------------------------------------------


def own(settings: Settings, key: str, uuid: str | None) -> Any:
    """The field of a GPU: its own value, else the node's."""
    field = CONFIGURED[key].field
    return settings.gpu.get(uuid or "", {}).get(field, getattr(settings, field))


def live_values(settings: Settings, devices: Sequence[Device]) -> dict[Key, Value]:
    """The configured values of what `nvshare-ctl set` may change."""
    found: dict[Key, Value] = {}
    for key, setting in CONFIGURED.items():
        for uuid in [device.uuid for device in devices] if setting.by_gpu else [None]:
            if setting.is_live:
                found[key, uuid] = setting.kind.plain(own(settings, key, uuid))
    return found


def needs_restart(started: Settings, now: Settings) -> list[str]:
    """Keys whose new values only a restart applies."""
    fixed = {key: setting.field for key, setting in CONFIGURED.items() if not (setting.is_live or setting.reloaded)}
    found = [key for key, field in fixed.items() if getattr(started, field) != getattr(now, field)]
    of_gpus = [
        {uuid: [values.get(field) for field in fixed.values()] for uuid, values in each.gpu.items()}
        for each in (started, now)
    ]
    return found if of_gpus[0] == of_gpus[1] else [*found, "gpu"]


def with_machine(settings: Settings, *, several: bool) -> Settings:
    """The settings as the engine gets them.  `several`: more than one user or slot may have clients."""
    budget = settings.host_budget_bytes or default_budget_bytes()
    return replace(settings, host_budget_bytes=budget, host_fair_times=settings.host_fair_times if several else 0)


def capacity_bytes(settings: Settings, device: Device, *, real: bool) -> int:
    """The configured capacity; by default a card's memory without what programs' CUDA contexts need: 1/32 of it, from
    512 MiB to 3 GiB.  A simulated GPU's contexts need none.  An integrated GPU leaves the host a part of its memory."""
    contexts = min(max(device.total_bytes // 32, 512 * MIB), 3072 * MIB) if real else 0
    capacity: int | None = own(settings, "capacity", device.uuid)
    default = int(SHARE * device.total_bytes) if device.integrated else device.total_bytes - contexts
    return capacity or max(device.total_bytes // 2, default)


def tls_dir(settings: Settings) -> Path | None:
    """Directory of the metrics' certificate."""
    return Path(settings.metrics_tls_dir) if settings.metrics_tls_dir else None


def check_machine(settings: Settings) -> None:
    """Raises StartError for an address, a file or a package that the settings need and that cannot be used."""
    try:
        if settings.metrics_port is not None:
            from nvshare.coordinator.system.http import metrics

            metrics.check(settings.metrics_address, tls_dir(settings))
        if settings.web_port is not None:
            check_installed()
            if settings.web_token_file is not None:
                read_token(Path(settings.web_token_file))
    except ValueError as error:
        raise StartError(str(error), 2) from None


def check_policies(settings: Settings) -> None:
    """Raises StartError for a policy that cannot be made."""
    for uuid in ("", *settings.gpu):
        try:
            registry.create(own(settings, "policy", uuid), uuid)
        except Exception as error:  # third-party code
            raise StartError(f"policy: {error}", 2) from None


def check_gpus(settings: Settings, devices: Sequence[Device]) -> None:
    """Raises StartError for settings of an unknown GPU."""
    uuids = [device.uuid for device in devices]
    for uuid in settings.gpu:
        if uuid not in uuids:
            raise StartError(f'[gpu."{uuid}"]: no such GPU; this node has {", ".join(uuids)}', 2)
