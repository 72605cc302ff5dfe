"""Hand-overs a second of one coordinator, and its memory: `python -m nvshare.bench.scale --json`.

A real coordinator process (its loop, ZeroMQ sockets, scheduler, journal) with made-up GPUs, and scripted clients in
another process, spread evenly over the GPUs, which always want the lease.  A client that is granted the lease gives it
back at once as idle, and asks for it again in the same message; so each hand-over is one `Release` in and one `Grant`
to another client out.  Hand-overs are counted by the coordinator (`handovers` in its status: a lease that goes to
another client than the one before), from one status to another some seconds later; resident memory is the
coordinator's peak, as the kernel says (VmHWM).

The clients need a processor too: on a machine with two, figures are those of a shared machine.

`--cost` measures what one event costs the core instead (`Scheduler.handle`, the log of events included), for each
policy, with all clients on one virtual GPU, where memory fits and where each has a tenth of the GPU.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgpack

from nvshare.bench.harness.command import add_figures, parser_for, run_benchmark
from nvshare.bench.harness.fixture import BenchError, percentile
from nvshare.bench.harness.wire_client import Link
from nvshare.bench.virtual_node.node import FIRST_REPORT_NS, FOREVER_NS, Job, VirtualNode
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import ControlCaller
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.scheduler_policies.registry import BUILT_IN

GIB = 1 << 30
CARD_BYTES = 80 * GIB


def uuid_of(gpu: int) -> str:
    """UUID of a made-up GPU."""
    return f"GPU-5ca1ab1e-0000-0000-0000-{gpu:012d}"


def run_coordinator(directory: Path, gpus: int, ready_fd: int) -> None:
    """Runs the coordinator in the child, with made-up GPUs."""
    from nvshare.coordinator.daemon import main as daemon
    from nvshare.coordinator.system.devices import Device

    devices = [Device(index, uuid_of(index), "made-up GPU", CARD_BYTES) for index in range(gpus)]
    turns = ["--sharing=exclusive", "--policy=round_robin", "--quantum=100ms"]
    options = ["--runtime-dir", str(directory), "--ready-fd", str(ready_fd), "--log-level", "warning"]
    daemon.serve_devices([*options, *turns], devices)


def run_clients(socket_path: Path, clients: int, gpus: int, ready_fd: int) -> None:
    """Runs all clients on one epoll in the child, until killed."""
    poller = select.epoll()
    links: dict[int, Link] = {}
    for number in range(clients):
        link = Link(socket_path)
        links[link.socket.fileno()] = link
        poller.register(link.socket, select.EPOLLIN)
        hello = messages.Hello(messages.PROTOCOL_VERSION, f"client {number}", "bench", 1, 0)
        uuid = uuid_of(number % gpus)
        link.send(messages.encode(hello))
        link.send(messages.encode(messages.AttachGpu(0, uuid, 0, True, 0, 0, 0)))
    os.write(ready_fd, b"\n")
    pack, unpack = msgpack.packb, msgpack.unpackb
    grant, release, idle = messages.Grant.TYPE, messages.Release.TYPE, int(messages.ReleaseReason.IDLE)
    while True:
        for descriptor, _ in poller.poll():
            link = links[descriptor]
            for content in link.take():
                message = unpack(content)
                if message[0] == grant:
                    now_ns = time.monotonic_ns()
                    link.send(pack([release, 0, message[2], idle, True, True, 0, now_ns, 1]))


def measure(clients: int, gpus: int, seconds: float) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="nvshare-scale-") as name:
        directory = RuntimeDir(Path(name) / "run")
        children: list[subprocess.Popen[bytes]] = []
        try:
            server = _child(children, "coordinator", str(directory.path), str(gpus))
            _child(children, "clients", str(directory.hooks_socket), str(clients), str(gpus))
            caller = ControlCaller(directory.control_socket)
            give_up_at = time.monotonic() + 60
            while _status(caller)["clients"] < clients:
                if time.monotonic() > give_up_at or any(child.poll() is not None for child in children):
                    raise BenchError("the clients did not come up")
                time.sleep(0.05)
            first = _status(caller)
            time.sleep(seconds)
            last = _status(caller)
            caller.close()
            rate = (last["handovers"] - first["handovers"]) / ((last["now_ns"] - first["now_ns"]) / 1e9)
            rss_mb = _peak_rss_kib(server.pid) / 1024
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGTERM)
                child.wait(10)
    return {"clients": clients, "gpus": gpus, "handovers_per_s": round(rate), "rss_mb": round(rss_mb, 1)}


def _child(children: list[subprocess.Popen[bytes]], *words: str) -> subprocess.Popen[bytes]:
    """Starts one and waits until it says that it is ready."""
    ready, report = os.pipe()
    command = [sys.executable, "-m", "nvshare.bench.scale", "--child", *words, str(report)]
    child = subprocess.Popen(command, pass_fds=(report,))
    children.append(child)
    os.close(report)
    try:
        if not select.select([ready], [], [], 60)[0] or not os.read(ready, 1):
            raise BenchError(f"{words[0]} did not start")
    finally:
        os.close(ready)
    return child


def _status(caller: ControlCaller) -> dict[str, Any]:
    status = api.decode_reply(caller.call(api.encode_request(api.Status(clients=False)), 30_000))
    gpus = status["gpus"]
    return {
        "now_ns": status["now_ns"],
        "handovers": sum(gpu["handovers"] for gpu in gpus),
        "clients": sum(gpu["clients"] for gpu in gpus),
    }


def _peak_rss_kib(process_id: int) -> int:
    for line in Path(f"/proc/{process_id}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise BenchError("the kernel does not tell the coordinator's memory")


WARM_UP = 4
"""Events of each client before the measurement: its turn, report and release among them."""


class Crowd(VirtualNode):
    """Many jobs on one virtual GPU that always want it; each event is timed, by the processor time of the thread."""

    def __init__(self, policy: str, clients: int, *, short: bool) -> None:
        self.spent_us: list[tuple[str, float]] = []
        size = CARD_BYTES // 10 if short else 1 << 20
        jobs = [Job(f"job {n}", 0, FOREVER_NS, memory_bytes=size, user=n % 8) for n in range(clients)]
        settings = Settings(policy=policy, max_clients=clients)
        super().__init__(jobs, 1, CARD_BYTES, settings, shared_report_ns=FIRST_REPORT_NS)

    def handle(self, event: events.Event) -> list[commands.Command]:
        before_ns = time.thread_time_ns()
        out = super().handle(event)
        self.spent_us.append((type(event).__name__, (time.thread_time_ns() - before_ns) / 1000))
        return out

    def run_events(self, count: int) -> None:
        """Runs until `count` more events have been handled."""
        end = self.handled + count
        while self.handled < end:
            self.step(FOREVER_NS)


def cost_of_event(policy: str, clients: int, count: int, *, short: bool) -> dict[str, Any]:
    """Microseconds for one event under a policy."""
    crowd = Crowd(policy, clients, short=short)
    while len(crowd.programs) < clients:
        crowd.step(FOREVER_NS)
    crowd.run_events(WARM_UP * clients)
    crowd.spent_us.clear()
    crowd.run_events(count)
    spent_us = [spent for _, spent in crowd.spent_us]
    kinds: dict[str, list[float]] = {}
    for kind, spent in crowd.spent_us:
        kinds.setdefault(kind, []).append(spent)
    return {
        "policy": policy,
        "memory": "short" if short else "fits",
        "median_us": round(median(spent_us), 1),
        "mean_us": round(fmean(spent_us), 1),
        "p99_us": round(percentile(spent_us, 0.99), 1),
        "medians_us": {kind: round(median(each), 1) for kind, each in sorted(kinds.items())},
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if not options.cost:
        return measure(options.clients, options.gpus, options.seconds)
    cases = [(policy, short) for policy in sorted(BUILT_IN) for short in (False, True)]
    found = [cost_of_event(policy, options.clients, options.events, short=short) for policy, short in cases]
    return {"clients": options.clients, "events": options.events, "cost": found}


def _show(result: dict[str, Any]) -> None:
    if "cost" not in result:
        print("{clients} clients on {gpus} GPUs: {handovers_per_s} hand-overs/s, {rss_mb} MB".format(**result))
    for one in result.get("cost", ()):
        print("{policy}, memory {memory}: {median_us} us median, {mean_us} mean, {p99_us} p99".format(**one))


def main() -> int:
    """Command line."""
    words = sys.argv[1:]
    if words[:2] == ["--child", "coordinator"]:
        run_coordinator(Path(words[2]), int(words[3]), int(words[4]))
        return 0
    if words[:2] == ["--child", "clients"]:
        run_clients(Path(words[2]), int(words[3]), int(words[4]), int(words[5]))
        return 0
    parser = parser_for("scale", "hand-overs a second of one coordinator", simulate=False)
    add_figures(
        parser,
        clients=(1000, "connections"),
        gpus=(8, "made-up GPUs"),
        seconds=(5.0, "how long hand-overs are counted"),
        events=(2000, "with --cost: events of each policy"),
    )
    parser.add_argument("--cost", action="store_true", help="what one event costs the core, for each policy")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
