"""Metrics of a running coordinator, read with Prometheus' own parser."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from nvshare.coordinator.protocol import messages
from tests.daemon.made_up_gpus import uuid_of
from tests.daemon.processes import Coordinators, Hook, Running
from tests.waiting import BOUND_S, eventually

Connect = Callable[..., Hook]


def scrape(running: Running) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found = re.search(r"http://\S+/metrics", running.log.read_text())
    assert found is not None
    assert "//127.0.0.1:" in found[0]
    with urllib.request.urlopen(found[0], timeout=BOUND_S) as reply:
        text = reply.read().decode()
    return {
        sample.name: {
            tuple(sorted(other.labels.items())): other.value for other in family.samples if other.name == sample.name
        }
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str, /, **labels: str) -> float:
    wanted = set(labels.items())
    found = [number for key, number in metrics[name].items() if wanted <= set(key)]
    assert len(found) == 1, (name, labels, metrics[name])
    return found[0]


def test_leases_waits_memory_and_clients_are_counted(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if what happened did not arrive in Prometheus, or a client that is gone stayed there."""
    running = coordinators.start("--metrics-port", "0", "--quantum", "60s", gpus=2)
    first = connect(running).hello('a "quoted" \\name').attach(wanted=True)
    lease = first.next(messages.Grant).lease_id
    second = connect(running).hello("second").attach(wanted=True)
    second.next(messages.GpuSettings)
    first.send(messages.State(0, 0, 5_000, 3_000, 1_000, 2_000))
    first.send(messages.State(messages.HOST, 0, 0, 0, 0, 0, asks=1, total_bytes=9_000))
    assert first.next(messages.Target).total_bytes == 9_000
    first.release(lease, idle=True)
    second.next(messages.Grant)
    metrics = scrape(running)
    gpu = uuid_of(0)
    assert value(metrics, "nvshare_clients") == 2
    assert value(metrics, "nvshare_gpu_leases_total", uuid=gpu) == 2
    assert value(metrics, "nvshare_gpu_leases_total", uuid=uuid_of(1)) == 0
    assert value(metrics, "nvshare_gpu_handovers_total", uuid=gpu) == 1
    assert value(metrics, "nvshare_gpu_idle_releases_total", uuid=gpu) == 1
    assert value(metrics, "nvshare_gpu_quantum_seconds", uuid=gpu) == 60
    assert value(metrics, "nvshare_wait_seconds_count", uuid=gpu) == 2
    assert value(metrics, "nvshare_wait_seconds_bucket", uuid=gpu, le="+Inf") == 2
    assert value(metrics, "nvshare_gpu_memory_bytes", uuid=gpu, kind="allocated") == 5_000
    for kind, size in (("resident", 3_000), ("evicted", 2_000), ("pinned", 1_000)):
        assert value(metrics, "nvshare_gpu_memory_bytes", uuid=gpu, kind=kind) == size
        assert value(metrics, "nvshare_client_memory_bytes", name='a "quoted" \\name', kind=kind) == size
    assert value(metrics, "nvshare_host_shared_bytes") == 9_000
    assert value(metrics, "nvshare_host_budget_bytes") >= 9_000
    assert value(metrics, "nvshare_host_refused_total") == 0
    for reason in ("full", "user", "slot", "silent", "protocol"):
        assert value(metrics, "nvshare_connections_refused_total", reason=reason) == 0
    assert value(metrics, "nvshare_client_host_share_bytes", name='a "quoted" \\name') == 9_000
    assert value(metrics, "nvshare_client_leases_total", name="second", pid=str(os.getpid())) == 1
    second.close()
    eventually(lambda: value(scrape(running), "nvshare_clients") == 1, "the end of the second client")
    assert all(dict(key)["name"] != "second" for key in scrape(running)["nvshare_client_leases_total"])


def test_a_port_that_is_taken_is_named_and_a_scraper_delays_no_stop(coordinators: Coordinators) -> None:
    """Broken if the coordinator ran without the metrics that were asked for, or they kept it from ending."""
    running = coordinators.start("--metrics-port", "0")
    found = re.search(r"127\.0\.0\.1:(\d+)", running.log.read_text())
    assert found is not None
    code, text = coordinators.refused("--metrics-port", found[1], directory=coordinators.base / "other")
    assert code == 1
    assert "choose another --metrics-port" in text
    scrape(running)
    assert running.stop() == 0
