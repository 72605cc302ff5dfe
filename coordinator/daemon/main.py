"""`nvshare-coordinator`: from flags to a running server, and out again.

Invariants: nothing is served before the directory is locked and the earlier coordinator's journal is read; every way in
which starting can fail ends with one message that names the remedy, and exit code 1, or 2 for a wrong command line or
setting.

May not go here: what happens while it runs (daemon/loop.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nvshare.coordinator.daemon import settings_file
from nvshare.coordinator.daemon.control_server import Administration
from nvshare.coordinator.daemon.core_settings import StartError, check_overrides, configured_events, core_settings
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.live_settings import NODE_EVENTS, Key, LiveSettings
from nvshare.coordinator.daemon.loop import Server, Sockets
from nvshare.coordinator.daemon.rehearsal import Rehearsal
from nvshare.coordinator.daemon.transport import Limits
from nvshare.coordinator.engine.scheduler import InvariantError, Scheduler
from nvshare.coordinator.kubernetes.slots import slot
from nvshare.coordinator.kubernetes.slots.slot import SlotError
from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
from nvshare.coordinator.kubernetes.slots.watch import SlotWatch
from nvshare.coordinator.model import events
from nvshare.coordinator.protocol.messages import MAX_FRAME_BYTES
from nvshare.coordinator.system import card_lock, runtime_dir
from nvshare.coordinator.system.card_lock import CardHeldError
from nvshare.coordinator.system.devices import Device, NoGpuError, discover, put_double_in_front
from nvshare.coordinator.system.journal import Journal
from nvshare.coordinator.system.process_limits import possible_connections
from nvshare.coordinator.system.runtime_dir import RuntimeDir, RuntimeDirError
from nvshare.coordinator.units import format_size, parse_duration
from nvshare.scheduler_policies import registry

log: Final = logging.getLogger("nvshare")

MAX_RESTARTS: Final = 3
CRASH_MEMORY_NS: Final = 60_000_000_000
CARD_PATIENCE_S: Final = 15.0
"""How long a coordinator whose starter waits for it waits for a card; longer than an embedded one lingers."""
_RESTARTS: Final = "NVSHARE_COORDINATOR_RESTARTS"


class CrashedError(Exception):
    """It ran, and something in it failed that must not: the cause."""

    def __init__(self, served_ns: int) -> None:
        super().__init__()
        self.served_ns = served_ns


@dataclass(frozen=True, slots=True)
class Options:
    """What only the command line says."""

    directory: RuntimeDir
    simulate: str | None = None
    slots_dir: Path | None = None
    embedded: bool = False
    linger_ns: int = 10_000_000_000
    ready_fd: int | None = None
    config_file: Path | None = None
    flags: dict[str, object] | None = None
    devices: Sequence[Device] | None = None
    """Given by a benchmark or test instead of being looked for."""


class Coordinator:
    """Everything that one coordinator is made of.  `close` undoes it in reverse."""

    def __init__(self, settings: settings_file.Settings, options: Options, devices: Sequence[Device]) -> None:
        """The directory must be prepared and locked.  Raises StartError."""
        self.settings = settings
        self.options = options
        self._keepalive: int | None = None
        directory = options.directory
        check_overrides(settings, devices)
        everybody = directory.path == runtime_dir.SYSTEM_DIRECTORY
        several = everybody or options.slots_dir is not None
        self.scheduler = Scheduler(registry.create, core_settings(settings, several=several))
        self._journal = Journal(directory.journal, [device.uuid for device in devices])
        connections = possible_connections(settings.max_clients)
        limits = Limits(
            connections=connections,
            connections_per_user=connections // 2 if everybody else connections,
            messages_per_s=settings.max_messages_per_s,
            frame_bytes=MAX_FRAME_BYTES,
            hello_ns=settings.hello_timeout_ns,
        )
        self._sockets = Sockets(directory, limits, everybody=everybody)
        self.dispatcher = Dispatcher(
            self.scheduler, self._sockets.hooks, self._journal, max_clients=settings.max_clients
        )
        self.dispatcher.bound_ranks(settings.max_priority, settings.max_weight)
        facts = {
            "simulated": options.simulate is not None,
            "runtime_dir": str(directory.path),
            "embedded": options.embedded,
        }
        self._live = self.dispatcher.live = LiveSettings(directory.live_settings)
        administration = Administration(
            self.dispatcher, devices, registry.create, facts, self._live, self._configured, self._problems
        )
        self.server = Server(self._sockets, self.dispatcher, administration, Rehearsal(self._journal.rewrite))
        if options.slots_dir is not None:
            self.dispatcher.slots = SlotBook()
            self._live.allocation = self.dispatcher.slots.allocation
        self._devices = devices
        self._metrics: Any = None

    def begin(self) -> None:
        """GPUs, recovery, metrics, signals."""
        now_ns = time.monotonic_ns()
        for device in self._devices:
            self._add(device, now_ns)
        if kept := self._apply(self._configured(), now_ns):
            log.info("as set live before: %s; `nvshare-ctl unset --all` undoes it", kept)
        if self.settings.metrics_port is not None:
            self._metrics = self._start_metrics(self.settings.metrics_port)
        if self.options.slots_dir is not None and self.dispatcher.slots is not None:
            self.server.watch_slots(SlotWatch(self.options.slots_dir, self._sockets.hooks, self.dispatcher.slots))
        if self.options.embedded:
            self.server.leave_when(self._nobody_needs_it, self.options.linger_ns)
        self.server.handle_signals(self.reload)

    def _add(self, device: Device, now_ns: int) -> None:
        override = self.settings.gpu.get(device.uuid, settings_file.GpuOverride())
        capacity = override.capacity_bytes or self.settings.capacity_bytes or device.total_bytes
        if capacity > device.total_bytes:
            log.warning("%s has only %s: that is its capacity", device.uuid, format_size(device.total_bytes))
        holder = self._journal.holder(device.uuid)
        self.dispatcher.event(
            events.GpuAdded(
                uuid=device.uuid,
                name=device.name,
                total_bytes=device.total_bytes,
                capacity_bytes=min(capacity, device.total_bytes),
                next_lease_id=self._journal.next_lease_id(device.uuid),
                expected_holder=holder,
                recovery_deadline_ns=now_ns + self.settings.recovery_ns if holder else 0,
            ),
            now_ns,
        )
        if holder is not None:
            log.info("%s: waiting for process %d, which holds its lease", device.uuid, holder)
            if holder > 0:
                started_at = self._journal.earlier[device.uuid].started_at
                self.server.watch_holder(device.uuid, holder, started_at, self.settings.recovery_ns)

    def _start_metrics(self, port: int) -> Any:
        from nvshare.coordinator.daemon import metrics

        observations = metrics.Observations()
        self.dispatcher.observe = observations.observe
        sys.setswitchinterval(0.0005)  # a scrape's thread must not hold the loop up for the usual 5 ms

        def picture() -> metrics.Picture:
            snapshot = self.scheduler.snapshot(time.monotonic_ns())
            book = self.dispatcher.slots
            slots = None if book is None else tuple(book.snapshots(snapshot.clients))
            return metrics.take(snapshot, observations, slots, self._sockets.hooks.refusals)

        address = self.settings.metrics_address
        try:
            served = metrics.MetricsServer(address, port, lambda: self.server.run_on_loop(picture, 2.0))
        except OSError as error:
            where = f"{self.settings.metrics_address}:{port}"
            raise StartError(f"metrics on {where}: {error.strerror}; choose another --metrics-port") from None
        log.info("metrics on http://%s:%d/metrics", self.settings.metrics_address, served.port)
        return served

    def reload(self) -> None:
        """SIGHUP: quantum, policy, sharing, host budget and bounds of ranks as the settings now say, unless set live.
        A mistake changes nothing."""
        try:
            settings = settings_file.load(self.options.flags or {}, file=self.options.config_file)
            check_overrides(settings, self._devices)
            configured = configured_events(settings, self._devices)
        except (settings_file.SettingsError, StartError) as error:
            log.error("settings are unchanged: %s", error)  # noqa: TRY400 (the operator's mistake, not ours)
            return
        self.settings = settings
        self.dispatcher.bound_ranks(settings.max_priority, settings.max_weight)
        kept = self._apply(configured, time.monotonic_ns())
        but = f"; as set live, whatever the settings say: {kept} (`nvshare-ctl unset` undoes it)" if kept else ""
        log.info("settings are read again%s", but)

    def _configured(self) -> dict[Key, events.Event]:
        return configured_events(self.settings, self._devices)

    def _apply(self, configured: Mapping[Key, events.Event], now_ns: int) -> str:
        """Each as set live, else as the settings say.  What was set live, in words."""
        live = self._live.node()
        for key, event in configured.items():
            self.dispatcher.event(NODE_EVENTS[key[0]](live[key], key[1]) if key in live else event, now_ns)
        return ", ".join(" of ".join(filter(None, key)) for key in configured if key in live)

    def _problems(self) -> list[str]:
        return [problem for problem in (self._journal.problem(), self._live.problem()) if problem is not None]

    def _nobody_needs_it(self) -> bool:
        self._keepalive = runtime_dir.take_keepalive_exclusively(self.options.directory)
        if self._keepalive is None:
            return False
        self._live.forget()  # it was for the programs that are gone
        return True

    def close(self) -> None:
        """Sockets away first, so that a client sees the end at once.  The journal stays: holders go on."""
        if self._metrics is not None:
            self._metrics.close()
        self._sockets.close()
        self.server.close()
        self._journal.close()


def find_devices(options: Options) -> list[Device]:
    """Real GPUs, or those of the simulation, for which NVML's double is put in front first.  Raises StartError.

    The state of a simulation lies in the directory exactly while its coordinator simulates: launchers go by that.
    """
    state = options.directory.simulated_gpu
    try:
        if options.simulate is None:
            state.unlink(missing_ok=True)
            return discover() if options.devices is None else list(options.devices)
        put_double_in_front(state, options.simulate or None)
        devices = discover()
        if options.directory.path == runtime_dir.SYSTEM_DIRECTORY:
            state.chmod(0o666)  # programs of all users share these cards
    except ValueError as error:
        raise StartError(f"--simulate: {error}", 2) from None
    except NoGpuError as error:
        raise StartError(str(error)) from None
    except OSError as error:
        raise StartError(f"{state}: {error.strerror}; remove it or choose another --runtime-dir") from None
    return devices


def serve(settings: settings_file.Settings, options: Options) -> None:
    """Runs a coordinator until it is told to stop.  Raises StartError, RuntimeDirError and CardHeldError."""
    runtime_dir.prepare(options.directory)
    if options.slots_dir is not None:
        try:
            slot.prepare(options.slots_dir)
        except SlotError as error:
            raise StartError(f"--slots-dir: {error}") from None
    lock = runtime_dir.lock(options.directory)
    devices = find_devices(options)
    patience_s = None if options.ready_fd is None else CARD_PATIENCE_S
    own = devices if options.devices is None else []  # made-up ones are nobody's
    cards = card_lock.hold([device.uuid for device in own], patience_s)
    try:
        coordinator = Coordinator(settings, options, devices)
    except OSError as error:
        raise runtime_dir.unusable(options.directory.path, error) from None
    began_ns = time.monotonic_ns()
    try:
        coordinator.begin()
        kind = "" if options.simulate is None else "simulated "
        log.info("serving %d %sGPU(s) in %s", len(devices), kind, options.directory.path)
        stays = not options.embedded and options.directory.path == runtime_dir.SYSTEM_DIRECTORY
        if stays:
            _mark(options.directory.daemon_mark)
        _tell_ready(options.ready_fd)
        coordinator.server.run()
        if stays and coordinator.server.ended_by == signal.SIGINT:  # at a terminal; a supervisor may start it again
            with contextlib.suppress(OSError):
                options.directory.daemon_mark.unlink(missing_ok=True)
    except (StartError, RuntimeDirError):
        raise
    except Exception as error:
        log.critical("stopping", exc_info=True)
        if isinstance(error, InvariantError):
            _keep_story(options.directory, error)
        raise CrashedError(time.monotonic_ns() - began_ns) from error
    finally:
        coordinator.close()
        for card in cards:
            card.close()
        os.close(lock)


def _mark(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        raise runtime_dir.unusable(path, error) from None


def _tell_ready(descriptor: int | None) -> None:
    if descriptor is None:
        return
    with contextlib.suppress(OSError):  # whoever waited for it is gone
        os.write(descriptor, b"\n")
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _keep_story(directory: RuntimeDir, error: InvariantError) -> None:
    """What led to our own mistake, for a report; `read` and `replay` of
    `engine/event_log.py` run it again."""
    path = directory.path / "story.jsonl"
    try:
        path.write_text("\n".join(error.lines) + "\n", encoding="utf-8")
    except OSError as failure:
        log.critical("an invariant is broken; %s cannot be written: %s", path, failure.strerror)
    else:
        log.critical("an invariant is broken; please report it with %s", path)


_HELP: Final = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=_HELP)


@app.command(help="Grants time on the GPUs of this node to the programs that share them.")
def run(
    context: typer.Context,
    config_file: Annotated[Path | None, typer.Option("--config", help="TOML file with settings")] = None,
    policy: Annotated[str | None, typer.Option(help="who runs next: round_robin, priority, fair_share, ...")] = None,
    quantum: Annotated[str | None, typer.Option(help="how long a turn lasts: 100ms, 2s, auto")] = None,
    sharing: Annotated[str | None, typer.Option(help="exclusive (in turns) or concurrent")] = None,
    capacity: Annotated[str | None, typer.Option(help="how much of each GPU clients may have resident: 4GiB")] = None,
    switch_share: Annotated[
        str | None, typer.Option(help="with --quantum=auto: the share of time that switching may cost: 5%")
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="pinned host memory that all clients may have together: 64GiB")
    ] = None,
    simulate: Annotated[
        str | None, typer.Option(metavar="[GPUS[xCAPACITY]]", help="simulated GPUs, such as --simulate=2x8GiB")
    ] = None,
    runtime: Annotated[Path | None, typer.Option("--runtime-dir", help="where the sockets are")] = None,
    slots_dir: Annotated[
        Path | None,
        typer.Option(envvar="NVSHARE_SLOTS_DIR", help="Kubernetes: serve the slots that the device plugin makes here"),
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="serve Prometheus metrics; 0 chooses a port")] = None,
    metrics_address: Annotated[str | None, typer.Option(help="127.0.0.1 unless told")] = None,
    max_clients: Annotated[int | None, typer.Option(help="at most so many clients (1024)")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error")] = None,
    embedded: Annotated[bool, typer.Option("--embedded", hidden=True)] = False,
    linger: Annotated[str, typer.Option(hidden=True)] = "10s",
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Typer's view of the command line; `main` turns what it raises into messages."""
    flags: dict[str, object] = {
        "policy": policy,
        "quantum": quantum,
        "sharing": sharing,
        "capacity": capacity,
        "switch_share": switch_share,
        "host_budget": host_budget,
        "metrics_port": metrics_port,
        "metrics_address": metrics_address,
        "max_clients": max_clients,
        "log_level": log_level,
    }
    settings = settings_file.load(flags, file=config_file)
    line = "%(asctime)s nvshare-coordinator %(levelname)s: %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), format=line, force=True)
    options = Options(
        directory=RuntimeDir(runtime.absolute()) if runtime is not None else runtime_dir.own_directory(),
        simulate=simulate,
        slots_dir=slots_dir.absolute() if slots_dir is not None else None,
        embedded=embedded,
        linger_ns=_linger(os.environ.get("NVSHARE_EMBEDDED_LINGER") or linger),
        ready_fd=ready_fd,
        config_file=config_file,
        flags=flags,
        devices=context.obj,
    )
    serve(settings, options)


def serve_devices(argv: Sequence[str], devices: Sequence[Device]) -> None:
    """As `main`, on these made-up GPUs: for benchmarks and tests of the coordinator alone."""
    main(argv, devices)


def _linger(text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise StartError(f"--linger: {error}", 2) from None


def main(argv: Sequence[str] | None = None, devices: Sequence[Device] | None = None) -> None:
    """Entry point.  Exit codes: 0 stopped, 1 could not run, 2 wrong command line or settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--simulate=" if word == "--simulate" else word for word in words]
    code = 0
    try:
        code = app(words, prog_name="nvshare-coordinator", obj=devices) or 0
    except settings_file.SettingsError as error:
        code = _complain(str(error), 2)
    except StartError as error:
        code = _complain(str(error), error.code)
    except (RuntimeDirError, CardHeldError) as error:
        code = _complain(str(error), 1)
    except CrashedError as error:
        code = _complain(f"our own mistake, please report it: {error.__cause__!r}", 1)
        start_again(error.served_ns)
    raise SystemExit(code)


def start_again(served_ns: int) -> None:
    """Becomes a fresh coordinator, to which clients come back.  Returns if that has not helped before."""
    before = 0 if served_ns > CRASH_MEMORY_NS else int(os.environ.get(_RESTARTS, "0"))
    if before >= MAX_RESTARTS:
        return
    words = [sys.executable, *sys.orig_argv[1:]]
    if "--ready-fd" in words:  # its reader was told long ago, and the number may mean another file now
        at = words.index("--ready-fd")
        del words[at : at + 2]
    log.warning("starting again")
    with contextlib.suppress(OSError):
        os.execve(words[0], words, {**os.environ, _RESTARTS: str(before + 1)})


def _complain(text: str, code: int) -> int:
    for line in text.splitlines():
        sys.stderr.write(f"nvshare-coordinator: {line}\n")
    return code


if __name__ == "__main__":
    main()
