"""Translates the settings into the engine's settings and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.coordinator.daemon import settings_file
from nvshare.coordinator.daemon.control.live_settings import Key
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import LeaseSettings, MemorySettings, QuantumSettings
from nvshare.coordinator.model.settings import Settings as CoreSettings
from nvshare.coordinator.system.devices import Device
from nvshare.coordinator.system.host_memory import default_budget_bytes
from nvshare.coordinator.system.web_process import check_installed, read_token
from nvshare.scheduler_policies import registry

MIB: Final = 1 << 20


class StartError(Exception):
    """The coordinator cannot start; the text names the remedy."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def core_settings(settings: settings_file.Settings, *, several: bool) -> CoreSettings:
    """The engine's part of the settings.  `several`: more than one user or slot may have clients."""
    return CoreSettings(
        policy=settings.policy,
        sharing=settings.sharing,
        users_first=settings.share_by == "user",
        quantum=QuantumSettings(
            quantum_ns=settings.quantum_ns,
            switch_share=settings.switch_share,
            longest_wait_ns=settings.longest_wait_ns,
        ),
        leases=LeaseSettings(
            drain_deadline_ns=settings.drain_deadline_ns,
            overdue_action=settings.overdue_action,
            pacing_budget_ns=settings.pacing_budget_ns,
            idle_release_ns=settings.idle_release_ns,
        ),
        memory=MemorySettings(
            host_budget_bytes=host_budget_bytes(settings),
            host_fair_times=MemorySettings().host_fair_times if several else 0,
        ),
        max_clients=settings.max_clients,
    )


def host_budget_bytes(settings: settings_file.Settings) -> int:
    """The configured budget, else a share of the memory of the machine or container."""
    return settings.host_budget_bytes or default_budget_bytes()


def capacity_bytes(settings: settings_file.Settings, device: Device, *, real: bool) -> int:
    """The configured capacity; by default a card's memory without what programs' CUDA contexts need: 1/32 of it, from
    512 MiB to 3 GiB.  A simulated GPU's contexts need none."""
    own = settings.gpu.get(device.uuid, settings_file.GpuOverride())
    contexts = min(max(device.total_bytes // 32, 512 * MIB), 3072 * MIB) if real else 0
    return own.capacity_bytes or settings.capacity_bytes or max(device.total_bytes // 2, device.total_bytes - contexts)


def configured_events(settings: settings_file.Settings, devices: Sequence[Device]) -> dict[Key, events.Event]:
    """Events that give each GPU and the node its configured values.  Raises StartError for an unusable policy."""
    found: dict[Key, events.Event] = {("host_budget", None): events.HostBudgetSet(host_budget_bytes(settings))}
    for uuid in (device.uuid for device in devices):
        own = settings.gpu.get(uuid, settings_file.GpuOverride())
        sharing = settings.sharing if own.sharing is None else own.sharing
        found["sharing", uuid] = events.SharingSet(sharing, uuid)
        found["switch_share", uuid] = events.SwitchShareSet(settings.switch_share, uuid)
        found["quantum", uuid] = events.QuantumSet(own.quantum_ns if own.sets_quantum else settings.quantum_ns, uuid)
        found["policy", uuid] = _policy_set(own.policy or settings.policy, [uuid], uuid)
    return found


def _policy_set(name: str, uuids: Sequence[str], uuid: str | None = None) -> events.PolicySet:
    try:
        return events.PolicySet(name, {each: registry.create(name, each) for each in uuids}, uuid)
    except Exception as error:  # third-party code
        raise StartError(f"policy: {error}", 2) from None


def check_machine(settings: settings_file.Settings) -> None:
    """Raises StartError for an address, a file or a package that the settings need and that cannot be used."""
    try:
        if settings.metrics_port is not None:
            from nvshare.coordinator.system.http import metrics  # imports Prometheus' client

            metrics.check(
                settings.metrics_address, metrics.Access(settings.metrics_token_file, settings.metrics_tls_dir)
            )
        if settings.web_port is not None:
            check_installed()
            if settings.web_token_file is not None:
                read_token(settings.web_token_file)
    except ValueError as error:
        raise StartError(str(error), 2) from None


def check_overrides(settings: settings_file.Settings, devices: Sequence[Device]) -> None:
    """Raises StartError for settings of an unknown GPU, and for an unusable policy."""
    uuids = [device.uuid for device in devices]
    for uuid in settings.gpu:
        if uuid not in uuids:
            raise StartError(f'[gpu."{uuid}"]: no such GPU; this node has {", ".join(uuids)}', 2)
    _policy_set(settings.policy, uuids[:1])
