"""`nvshare-coordinator`: reads the command line, starts the coordinator, runs it and restarts it after a crash.

Invariants: the coordinator locks its directory and reads the earlier journal before it serves.  A failed start prints
one message with the remedy and exits with code 1, or 2 for a wrong command line or setting.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
import contextlib
import functools
import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nvshare.coordinator.daemon import settings_file
from nvshare.coordinator.daemon.coordinator import Coordinator, Options
from nvshare.coordinator.daemon.log_limit import LogLimit
from nvshare.coordinator.daemon.log_names import GpuNames
from nvshare.coordinator.daemon.settings_file import StartError
from nvshare.coordinator.daemon.supervisor import Supervisor
from nvshare.coordinator.engine.scheduler import InvariantError
from nvshare.coordinator.kinds import Setting
from nvshare.coordinator.kubernetes.slots import slot
from nvshare.coordinator.kubernetes.slots.slot import SlotError
from nvshare.coordinator.model.settings import CONFIGURED, Settings
from nvshare.coordinator.system import card_lock, runtime_dir
from nvshare.coordinator.system.card_lock import CardHeldError
from nvshare.coordinator.system.devices import Device, NoGpuError, discover, load_simulated_nvml
from nvshare.coordinator.system.runtime_dir import RuntimeDir, RuntimeDirError
from nvshare.coordinator.system.version import VersionOption, run_command
from nvshare.coordinator.units import count, format_duration, parse_duration

log: Final = logging.getLogger("nvshare")

MAX_RESTARTS: Final = 3
CRASH_MEMORY_NS: Final = 60_000_000_000
CARD_PATIENCE_S: Final = 15.0
"""Longest wait for a card when a launcher waits for this coordinator; longer than an embedded one lingers."""
DRIVER_LOOK_S: Final = 2.0
_RESTARTS: Final = "NVSHARE_COORDINATOR_RESTARTS"


class CrashedError(Exception):
    """The running coordinator failed by a mistake of its own, given as the cause."""

    def __init__(self, served_ns: int) -> None:
        super().__init__()
        self.served_ns = served_ns


def find_devices(options: Options) -> list[Device]:
    """Real GPUs, or simulated ones by the simulated NVML.  Raises StartError.

    The simulation's state file is in the directory only while the coordinator simulates; launchers rely on that.
    """
    from nvshare.simulated_gpu.trace import is_usable

    state = options.directory.simulated_gpu
    try:
        if options.simulate is None:
            state.unlink(missing_ok=True)
            return discover() if options.devices is None else list(options.devices)
        if not is_usable(state, options.simulate) and not runtime_dir.forget_simulation(options.directory):
            log.warning("programs use other GPUs of %s; serving those, not %s", state.parent, options.simulate)
        load_simulated_nvml(state, options.simulate or None)
        try:
            devices = discover()
        except NoGpuError:  # the library has said why
            raise StartError(f"--simulate: simulated GPUs cannot be made in {options.directory.path}") from None
        if options.directory.path == runtime_dir.SYSTEM_DIRECTORY:
            state.chmod(0o666)  # programs of all users share these GPUs
    except ValueError as error:
        raise StartError(f"--simulate: {error}", 2) from None
    except NoGpuError as error:
        alone = options.simulate is None and not options.driver_wait_ns
        remedy = ", or run on a simulated GPU with --simulate" if alone else ""
        raise StartError(f"{error}{remedy}") from None
    except OSError as error:
        raise StartError(f"{state}: {error.strerror}; remove it or choose another --runtime-dir") from None
    return devices


def wait_for_devices(settings: Settings, options: Options) -> list[Device]:
    """As `find_devices`, but a driver or GPU may come late, by `--wait-for-driver`.

    Meanwhile the metrics port answers `/livez`, and nothing else.  The wait ends, because a container may need to be
    made again to see a driver that is new on its node.
    """
    if not options.driver_wait_ns:
        return find_devices(options)
    deadline_ns = time.monotonic_ns() + options.driver_wait_ns
    probes: Any = None
    try:
        while True:
            try:
                return find_devices(options)
            except StartError as error:
                if error.code != 1 or time.monotonic_ns() >= deadline_ns:
                    raise
                if probes is None:
                    log.warning("%s; waiting up to %s for it", error, format_duration(options.driver_wait_ns))
                    probes = contextlib.ExitStack()
                    _answer_probes(settings, probes)
            time.sleep(DRIVER_LOOK_S)
    finally:
        if probes is not None:
            probes.close()


def _answer_probes(settings: Settings, until: contextlib.ExitStack) -> None:
    from nvshare.coordinator.system.http.metrics import AccessError, MetricsServer

    for number in (signal.SIGTERM, signal.SIGINT):
        until.callback(signal.signal, number, signal.signal(number, lambda *_: sys.exit(0)))
    if settings.metrics_port:
        address, port, tls_dir = settings.metrics_address, settings.metrics_port, settings_file.tls_dir(settings)
        try:
            until.callback(MetricsServer(address, port, None, tls_dir).close)
        except (OSError, AccessError) as error:
            raise StartError(f"metrics on {address}:{port}: {error}") from None


def serve(settings: Settings, options: Options) -> None:
    """Runs a coordinator until it stops.  Raises StartError, RuntimeDirError, CardHeldError and CrashedError."""
    runtime_dir.prepare(options.directory)
    if options.slots_dir is not None:
        try:
            slot.prepare(options.slots_dir)
        except SlotError as error:
            raise StartError(f"--slots-dir: {error}") from None
    lock = runtime_dir.lock(options.directory, embedded=options.embedded)
    supervisor = Supervisor(os.environ)
    supervisor.tell("STATUS=looking for a driver and a GPU that no other coordinator serves")
    devices = wait_for_devices(settings, options)
    for device in devices:
        log.info("GPU %d is %s, %s", device.index, device.name, device.uuid)
    for handler in logging.getLogger().handlers:
        handler.addFilter(GpuNames(devices))
    patience_s = None if options.ready_fd is None else CARD_PATIENCE_S
    own = devices if options.devices is None else []  # made-up GPUs need no lock
    note_wait = functools.partial(runtime_dir.note_wait, lock)
    cards = card_lock.hold([device.uuid for device in own], patience_s, note_wait)
    note_wait("")
    try:
        coordinator = Coordinator(settings, options, devices, supervisor)
    except OSError as error:
        raise runtime_dir.unusable(options.directory.path, error) from None
    began_ns = time.monotonic_ns()
    try:
        coordinator.begin()
        kind = "" if options.simulate is None else "simulated "
        log.info("serving %s in %s", count(len(devices), f"{kind}GPU"), options.directory.path)
        _mark(options.directory.daemon_mark, comes_back=supervisor.restarts and not options.embedded)
        _tell_ready(options.ready_fd)
        supervisor.tell("READY=1", coordinator.status_line())
        coordinator.server.run()
        supervisor.tell("STOPPING=1")
        if not supervisor.restarts and not len(coordinator.dispatcher):
            runtime_dir.forget_simulation(options.directory)
    except (StartError, RuntimeDirError):
        raise
    except Exception as error:
        log.critical("stopping", exc_info=True)
        if isinstance(error, InvariantError):
            _keep_event_log(options.directory, error)
        raise CrashedError(time.monotonic_ns() - began_ns) from error
    finally:
        coordinator.close()
        for card in cards:
            card.close()
        os.close(lock)


def _mark(path: Path, *, comes_back: bool) -> None:
    try:
        path.touch(mode=0o600) if comes_back else path.unlink(missing_ok=True)
    except OSError as error:
        raise runtime_dir.unusable(path, error) from None


def _tell_ready(descriptor: int | None) -> None:
    if descriptor is None:
        return
    with contextlib.suppress(OSError):  # the waiting launcher is gone
        os.write(descriptor, b"\n")
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _keep_event_log(directory: RuntimeDir, error: InvariantError) -> None:
    """Writes the events before a broken invariant, for a report.  engine/event_log.py replays them."""
    path = directory.path / "event_log.jsonl"
    try:
        path.write_text("\n".join(error.lines) + "\n", encoding="utf-8")
    except OSError as failure:
        log.critical("an invariant is broken; %s cannot be written: %s", path, failure.strerror)
    else:
        log.critical("an invariant is broken; please report it with %s", path)


_HELP: Final = {"help_option_names": ["-h", "--help"]}
Simulated = Annotated[
    str | None, typer.Option(metavar="[GPUS[xCAPACITY]]", help="simulated GPUs, such as --simulate=2x8GiB")
]
DriverWait = Annotated[
    str | None, typer.Option(help="at the start: longest wait for a driver and a GPU, such as 5m (none)")
]
SlotsDir = Annotated[
    Path | None,
    typer.Option(envvar="NVSHARE_SLOTS_DIR", help="Kubernetes: directory of the device plugin's slots"),
]
app = typer.Typer(pretty_exceptions_enable=False, context_settings=_HELP)


def _option(setting: Setting) -> inspect.Parameter:
    words = settings_file.words
    kind: Any = str if setting.kind.quoted else setting.kind.of
    metavar = f"[{'|'.join(setting.kind.words)}]" if setting.kind.words else None
    about = setting.help.replace("`", "") + ("" if setting.default is None else f" ({setting.default_shown})")
    option = typer.Option(help=about, metavar=metavar, autocompletion=lambda: words(setting.kind))
    hint = Annotated[kind | None, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=None)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags of the settings to a command, which finds them in its context."""
    own = {**inspect.signature(command, eval_str=True).parameters}
    own.pop("flags")
    own |= {name: _option(setting) for name, setting in CONFIGURED.items()}
    command.__signature__ = inspect.Signature(list(own.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in own.values()}
    return command


@app.command(help="Grant the programs on this node time slices of its GPUs.")
@with_settings
def run(
    context: typer.Context,
    *,
    config_file: Annotated[Path | None, typer.Option("--config", help="TOML file with settings")] = None,
    simulate: Simulated = None,
    runtime: Annotated[Path | None, typer.Option("--runtime-dir", help="directory of the sockets")] = None,
    slots_dir: SlotsDir = None,
    wait_for_driver: DriverWait = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="check the settings and exit")] = False,
    embedded: Annotated[bool, typer.Option("--embedded", hidden=True)] = False,
    linger: Annotated[str, typer.Option(hidden=True)] = "10s",
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    version: VersionOption = False,
    **flags: object,
) -> None:
    """Declares the command line; `main` turns its exceptions into messages."""
    settings = settings_file.load(flags, file=config_file)
    settings_file.check_machine(settings)
    settings_file.check_policies(settings)
    if check_config:
        typer.echo("nvshare-coordinator: the settings are valid; the start checks the names of GPUs")
        raise typer.Exit
    line = "%(asctime)s nvshare-coordinator %(levelname)s: %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), format=line, force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    options = Options(
        directory=RuntimeDir(runtime.absolute()) if runtime is not None else runtime_dir.own_directory(),
        simulate=simulate,
        slots_dir=slots_dir.absolute() if slots_dir is not None else None,
        embedded=embedded,
        linger_ns=_duration("--linger", os.environ.get("NVSHARE_EMBEDDED_LINGER") or linger),
        driver_wait_ns=0 if wait_for_driver is None else _duration("--wait-for-driver", wait_for_driver),
        ready_fd=ready_fd,
        config_file=config_file,
        flags=flags,
        devices=context.obj,
    )
    serve(settings, options)


def serve_devices(argv: Sequence[str], devices: Sequence[Device]) -> None:
    """As `main`, with made-up GPUs: for benchmarks and tests of the coordinator alone."""
    main(argv, devices)


def _duration(option: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise StartError(f"{option}: {error}", 2) from None


def main(argv: Sequence[str] | None = None, devices: Sequence[Device] | None = None) -> None:
    """Entry point.  Exit codes: 0 stopped, 1 failed, 2 wrong command line or settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--simulate=" if word == "--simulate" else word for word in words]
    following = [*words, ""][1:]
    words = [
        "--mps=same_user" if word == "--mps" and after not in ("off", "same_user") else word
        for word, after in zip(words, following, strict=True)
    ]
    code = 0
    try:
        code = run_command(app, words, "nvshare-coordinator", obj=devices) or 0
    except settings_file.SettingsError as error:
        code = _complain(str(error), 2)
    except StartError as error:
        code = _complain(str(error), error.code)
    except (RuntimeDirError, CardHeldError) as error:
        code = _complain(str(error), 1)
    except CrashedError as error:
        code = _complain(f"internal error, please report it: {error.__cause__!r}", 1)
        restart(error.served_ns)
    raise SystemExit(code)


def restart(served_ns: int) -> None:
    """Executes a fresh coordinator, to which the clients reconnect.  Returns after `MAX_RESTARTS` early crashes."""
    before = 0 if served_ns > CRASH_MEMORY_NS else int(os.environ.get(_RESTARTS, "0"))
    if before >= MAX_RESTARTS:
        return
    words = [sys.executable, *sys.orig_argv[1:]]
    if "--ready-fd" in words:  # the launcher is already notified; the number may now mean another file
        at = words.index("--ready-fd")
        del words[at : at + 2]
    log.warning("restarting")
    with contextlib.suppress(OSError):
        os.execve(words[0], words, {**os.environ, _RESTARTS: str(before + 1)})


def _complain(text: str, code: int) -> int:
    for line in text.splitlines():
        sys.stderr.write(f"nvshare-coordinator: {line}\n")
    return code


if __name__ == "__main__":
    main()
