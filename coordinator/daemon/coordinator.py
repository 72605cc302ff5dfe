"""One coordinator: the engine, its sockets, journal and settings, wired together."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nvshare.client_hook.launcher import coordinator_environment, package_root
from nvshare.coordinator.daemon import settings_file, time_limit
from nvshare.coordinator.daemon.checkpoint_processes import KEPT, CheckpointProcesses
from nvshare.coordinator.daemon.control.live_settings import LiveSettings
from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.control.server import Administration
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.loop import Server, Sockets
from nvshare.coordinator.daemon.peers import Limits, possible_connections
from nvshare.coordinator.daemon.settings_file import Key, StartError
from nvshare.coordinator.daemon.supervisor import Supervisor
from nvshare.coordinator.daemon.usage import Usage
from nvshare.coordinator.engine.policy_guard import PolicyGuard
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kinds import Value
from nvshare.coordinator.kubernetes.slots.slot import note_hook_registered
from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
from nvshare.coordinator.kubernetes.slots.watch import SlotWatch
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.protocol.messages import MAX_FRAME_BYTES
from nvshare.coordinator.system import runtime_dir
from nvshare.coordinator.system.checkpoints import cannot_park
from nvshare.coordinator.system.devices import Device
from nvshare.coordinator.system.gpu_processes import (
    CardMemory,
    UnhookedWatch,
    computing_processes,
    in_initial_pid_namespace,
    unhooked_processes,
)
from nvshare.coordinator.system.journal import Journal
from nvshare.coordinator.system.mps.daemon import ControlDaemon
from nvshare.coordinator.system.mps.service import Mps
from nvshare.coordinator.system.notifications import Notifications
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.system.sensors import Sensors
from nvshare.coordinator.system.version import version
from nvshare.coordinator.system.web_process import WebError, WebProcess, listen
from nvshare.coordinator.units import count, format_size

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.metrics import Observations

log: Final = logging.getLogger("nvshare")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line that are no settings."""

    directory: RuntimeDir
    simulate: str | None = None
    slots_dir: Path | None = None
    embedded: bool = False
    linger_ns: int = 10_000_000_000
    ready_fd: int | None = None
    config_file: Path | None = None
    flags: dict[str, object] | None = None
    driver_wait_ns: int = 0
    """Longest wait for a driver and a GPU at the start."""
    devices: Sequence[Device] | None = None
    """Made-up GPUs of a benchmark or test; None: discover the real ones."""


def _limits(settings: Settings, *, all_users: bool) -> Limits:
    """Of the hooks' connections."""
    connections = possible_connections(settings.max_clients)
    return Limits(
        connections=connections,
        connections_per_user=connections // 2 if all_users else connections,
        messages_per_s=settings.max_messages_per_s,
        frame_bytes=MAX_FRAME_BYTES,
        hello_ns=settings.hello_timeout_ns,
    )


class Coordinator:
    """All parts of one coordinator."""

    def __init__(self, settings: Settings, options: Options, devices: Sequence[Device], supervisor: Supervisor) -> None:
        """Opens the sockets.  The directory must be prepared and locked.  Raises StartError and OSError."""
        directory = options.directory
        all_users = directory.path == runtime_dir.SYSTEM_DIRECTORY
        self._several = all_users or options.slots_dir is not None
        self.settings = self._started = settings = settings_file.with_machine(settings, several=self._several)
        self.options = options
        self._real = options.simulate is None and options.devices is None
        self._supervisor = supervisor
        self._keepalive: int | None = None
        settings_file.check_gpus(settings, devices)
        if time_limit.possible():
            PolicyGuard.time_limit = time_limit.TimeLimit
        uuids = [device.uuid for device in devices]
        self.scheduler = Scheduler(time_limit.make_policy, self.settings, cannot_park=cannot_park())
        self._journal = Journal(directory.journal, uuids)
        self._rights = Rights(os.geteuid(), settings.max_priority, settings.max_weight, settings.hide_other_users)
        self._sockets = Sockets(directory, _limits(settings, all_users=all_users), self._rights, all_users=all_users)
        book = None if options.slots_dir is None else SlotBook(partial(note_hook_registered, options.slots_dir))
        self._live = LiveSettings(directory.live_settings, lambda slot: book.allocation(slot) if book else None)
        self._observations: Observations | None = None
        if settings.metrics_port is not None:
            from nvshare.coordinator.daemon import metrics  # imports Prometheus' client

            self._observations = metrics.Observations(uuids)
        self._notifications: Notifications | None = None
        if settings.notify_command is not None:
            self._notifications = Notifications(settings.notify_command, uuids, coordinator_environment(os.environ))
        self._mps = None if settings.mps == "off" else self._make_mps(directory, all_users=all_users)
        by_process = self._mps is None and (options.simulate is not None or in_initial_pid_namespace())
        self._card_memory = CardMemory(self._memory_checked, by_process=by_process)
        self._helpers = CheckpointProcesses(
            self._sockets.waiter, self._helper_environment(), frozenset(uuids), self._driver_done
        )
        self._usage = self._make_usage(settings, book)
        self.dispatcher = Dispatcher(
            self.scheduler,
            self._sockets.hooks,
            self._journal,
            self._rights,
            max_clients=settings.max_clients,
            slots=book,
            live=self._live,
            watch_end=self._sockets.ends.watch,
            check_memory=self._card_memory.ask if options.devices is None else None,
            park=self._helpers.carry_out,
            events_to=self._sockets.events,
            observers=[each.observe for each in (self._notifications, self._observations) if each is not None],
            left=self._usage.left,
        )
        self._sensors = Sensors(uuids)
        administration = self._administration(devices)
        self.server = Server(self._sockets, self.dispatcher, administration, self._helpers, self._usage)
        self._devices = devices
        self._metrics: Any = None
        self._web: WebProcess | None = None
        self._unhooked = UnhookedWatch(lambda: unhooked_processes(computing_processes()))

    def _administration(self, devices: Sequence[Device]) -> Administration:
        facts = {
            "simulated": self.options.simulate is not None,
            "runtime_dir": str(self.options.directory.path),
            "embedded": self.options.embedded,
            "version": version(),
            "installation": str(package_root()),
            "began_s": time.time(),
            "usage_dir": str(self._usage.directory),
        }
        return Administration(
            self.dispatcher,
            devices,
            time_limit.make_policy,
            facts,
            self._live,
            self._configured,
            self._problems,
            self._rights,
            mps=None if self._mps is None else self._mps.status,
            sensors=self._sensors.look,
        )

    def _make_usage(self, settings: Settings, book: SlotBook | None) -> Usage:
        directory = Path(settings.usage_dir) if settings.usage_dir else self.options.directory.path
        try:
            return Usage(
                directory.absolute(),
                time.monotonic_ns(),
                self.scheduler.snapshot,
                (lambda _: None) if book is None else book.slot,
                lambda: self._rights.hide_other_users,
                idle=lambda: not len(self.dispatcher),
            )
        except OSError as error:
            raise StartError(f"usage_dir: {directory}: {error.strerror}; choose another --usage-dir") from None

    def begin(self) -> None:
        """Adds the GPUs, begins the recovery, and starts metrics and signal handlers."""
        now_ns = time.monotonic_ns()
        for device in self._devices:
            self._add(device, now_ns)
        if kept := self._apply(settings_file.live_values(replace(self.settings, gpu={}), self._devices), now_ns):
            log.info("kept live settings: %s; `nvshare-ctl unset --all` removes them", kept)
        if self.settings.metrics_port is not None and self._observations is not None:
            self._metrics = self._start_metrics(self.settings.metrics_port, self._observations)
        if self.settings.web_port is not None:
            self._web = self._start_web(self.settings.web_port)
        if self.options.slots_dir is not None and self.dispatcher.slots is not None:
            self.server.watch_slots(SlotWatch(self.options.slots_dir, self._sockets.hooks, self.dispatcher.slots))
        if self._notifications is not None:
            self._notifications.start()
        if self._mps is not None:
            self._mps.start()
        if self._real:
            self._unhooked.start()
        if self.options.devices is None:
            self._card_memory.start()
            self._sensors.start()
        if self.options.embedded:
            self.server.leave_when(self._is_unused, self.options.linger_ns)
        tell, period_ns = self._supervisor.tell, self._supervisor.ping_period_ns
        if period_ns is not None:
            self.server.ping(period_ns, lambda: tell("WATCHDOG=1", self.status_line()))
        self.server.handle_signals(self._reload_by_signal)

    def status_line(self) -> str:
        """What `systemctl status` shows."""
        kind = "" if self.options.simulate is None else "simulated "
        return f"STATUS=serving {count(len(self._devices), f'{kind}GPU')} to {count(len(self.dispatcher), 'program')}"

    def _reload_by_signal(self) -> None:
        self._supervisor.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1_000}")
        self.reload()
        self._supervisor.tell("READY=1", self.status_line())

    def _memory_checked(self, uuid: str, by_process: dict[str, int], unlisted_bytes: int) -> None:
        checked = events.MemoryChecked(uuid, by_process, unlisted_bytes)
        self.server.post(lambda: self.dispatcher.event(checked, time.monotonic_ns()))

    def _helper_environment(self) -> Mapping[str, str]:
        """For processes of ours that use the driver."""
        simulated = self.options.simulate is not None
        own = coordinator_environment(os.environ)  # with the PYTHONPATH by which nvshare is found, if any
        kept = {k: v for k, v in own.items() if k in KEPT or (simulated and k.startswith("NVSHARE_SIM_"))}
        if not simulated:
            return kept
        from nvshare.simulated_gpu.environment import simulated_environment

        return simulated_environment(self.options.directory.simulated_gpu, None, kept)

    def _driver_done(self, event: events.Saved | events.Restored) -> None:
        self.server.post(lambda: self.dispatcher.event(event, time.monotonic_ns()))

    def _add(self, device: Device, now_ns: int) -> None:
        capacity = settings_file.capacity_bytes(self.settings, device, real=self._real)
        if capacity > device.total_bytes:
            log.warning("%s: capacity limited to its memory, %s", device.uuid, format_size(device.total_bytes))
        holder = self._journal.holder(device.uuid)
        self.dispatcher.event(
            events.GpuAdded(
                uuid=device.uuid,
                name=device.name,
                total_bytes=device.total_bytes,
                capacity_bytes=min(capacity, device.total_bytes),
                integrated=device.integrated,
                next_lease_id=self._journal.next_lease_id(device.uuid),
                expected_holder=holder,
            ),
            now_ns,
        )
        if self.options.devices is None:  # before a client of an earlier coordinator says what it has
            self.dispatcher.event(events.MemoryChecked(device.uuid, *self._card_memory.read(device.uuid)), now_ns)
        if holder is not None:
            who = f"holder, process {holder}" if holder > 0 else "holders"
            log.info("%s: waiting for the earlier lease %s", device.uuid, who)
            if holder > 0:
                self.server.watch_holder(holder, self._journal.earlier[device.uuid].started_at)

    def _make_mps(self, directory: RuntimeDir, *, all_users: bool) -> Mps:
        real = self._real
        slots = self.options.slots_dir is not None
        off = 'no launcher starts the programs of slots (--slots-dir); set mps = "off" here' if slots else None
        daemon = ControlDaemon(directory.mps, dict(os.environ), real_cards=real)

        def publish(kind: str, values: dict[str, Any]) -> None:
            self.server.post(lambda: self.dispatcher.note(kind, values, time.monotonic_ns()))

        return Mps(directory.mps_socket, daemon, publish, all_users=all_users, cause_off=off)

    def _start_metrics(self, port: int, observations: Observations) -> Any:
        from nvshare.coordinator.daemon import metrics
        from nvshare.coordinator.system.http.metrics import AccessError, MetricsServer

        sys.setswitchinterval(0.0005)  # a scrape's thread must not block the loop for the default 5 ms

        def picture() -> metrics.Picture:
            snapshot = self.scheduler.snapshot(time.monotonic_ns())
            book = self.dispatcher.slots
            slots = None if book is None else tuple(book.snapshots(snapshot.clients))
            hide = self.settings.hide_other_users  # any user of the machine reads a port
            return metrics.take(snapshot, observations, slots, self._sockets.hooks.refusals, hide_names=hide)

        address = self.settings.metrics_address
        try:
            served = MetricsServer(
                address,
                port,
                metrics.Collector(lambda: self.server.run_on_loop(picture)),
                settings_file.tls_dir(self.settings),
                lambda: self.server.run_on_loop(lambda: True),
            )
        except AccessError as error:
            raise StartError(str(error), 2) from None
        except OSError as error:
            where = f"{self.settings.metrics_address}:{port}"
            raise StartError(f"metrics on {where}: {error.strerror}; choose another --metrics-port") from None
        scheme = "https" if self.settings.metrics_tls_dir else "http"
        log.info("metrics on %s://%s:%d/metrics", scheme, self.settings.metrics_address, served.port)
        return served

    def _start_web(self, port: int) -> WebProcess:
        options = ["--runtime-dir", str(self.options.directory.path)]
        try:
            if self.settings.web_token_file is not None:
                options += ["--token-file", self.settings.web_token_file]
            web = WebProcess(listen(port), options)
        except WebError as error:
            raise StartError(str(error)) from None
        web.start()
        log.info("page on http://127.0.0.1:%d/", web.port)
        return web

    def reload(self) -> None:
        """SIGHUP: reads the settings again.  Live settings stay; faulty settings change nothing.

        Applies the GPUs' settings, the host budget, and the rights of users.
        """
        try:
            settings = settings_file.load(self.options.flags or {}, file=self.options.config_file)
            settings_file.check_gpus(settings, self._devices)
            settings_file.check_policies(settings)
        except (settings_file.SettingsError, StartError) as error:
            log.error("settings are unchanged: %s", error)  # noqa: TRY400 (the operator's mistake)
            return
        self.settings = settings_file.with_machine(settings, several=self._several)
        self._rights.set_bounds(settings.max_priority, settings.max_weight, hide=settings.hide_other_users)
        kept = self._apply({}, time.monotonic_ns())
        but = f"; live settings stay in force: {kept} (`nvshare-ctl unset` removes them)" if kept else ""
        log.info("settings reloaded%s", but)
        if later := settings_file.needs_restart(self._started, settings):
            log.warning("changes of %s need a restart of the coordinator, which programs survive", ", ".join(later))

    def _configured(self) -> dict[Key, Value]:
        return settings_file.live_values(self.settings, self._devices)

    def _apply(self, known: Mapping[Key, Value], now_ns: int) -> str:
        """Gives the engine the settings that it does not know, and live ones in their place.  Describes these."""
        configured, live = self._configured(), self._live.node()
        for key in configured:
            value = live[key] if key in live else configured[key]
            if key not in known or value != known[key]:
                self.dispatcher.event(events.Set(key[0], value, key[1]), now_ns)
        kept = sorted(configured.keys() & live.keys(), key=lambda key: (key[1] or "", key[0]))
        return ", ".join(" of ".join(filter(None, key)) for key in kept)

    def _problems(self) -> list[str]:
        parts = (self._journal, self._live, self._usage)
        return [problem for part in parts if (problem := part.problem()) is not None]

    def _is_unused(self) -> bool:
        self._keepalive = runtime_dir.take_keepalive_exclusively(self.options.directory)
        if self._keepalive is None:
            return False
        self._live.forget()  # its programs are gone
        self.options.directory.simulated_gpu.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Closes the sockets first, so that clients notice at once.  The journal file stays for a successor."""
        self._unhooked.close()
        self._card_memory.close()
        self._sensors.close()
        self._helpers.close()
        if self._notifications is not None:
            self._notifications.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._web is not None:
            self._web.close()
        self._sockets.close()
        self._usage.close(time.monotonic_ns())
        if self._mps is not None:
            self._mps.close()
        self.server.close()
        self._journal.close()
