"""The port of the metrics: TLS and the paths of probes, also while a coordinator waits for a driver."""

from __future__ import annotations

import contextlib
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from prometheus_client.core import GaugeMetricFamily, Metric

from nvshare.coordinator.daemon import main, settings_file
from nvshare.coordinator.daemon.coordinator import Options
from nvshare.coordinator.daemon.settings_file import StartError
from nvshare.coordinator.system.devices import Device, NoGpuError
from nvshare.coordinator.system.http.metrics import AccessError, MetricsServer
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.waiting import BOUND_S


class One:
    """A collector of one series."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("one", "one", value=1)


def get(url: str, trusted: ssl.SSLContext | None = None) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(url, timeout=BOUND_S, context=trusted) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_and_probes() -> None:
    """Broken: Prometheus sees nothing, or the kubelet ends a coordinator that serves."""
    served = MetricsServer("127.0.0.1", 0, One())
    with contextlib.closing(served):
        url = f"http://127.0.0.1:{served.port}"
        status, text = get(f"{url}/metrics")
        assert (status, "one 1.0" in text) == (200, True)
        assert get(f"{url}/livez")[0] == get(f"{url}/readyz")[0] == 200


def test_a_loop_that_does_not_answer_is_not_alive() -> None:
    """Broken: a coordinator that hangs is never restarted."""

    def hangs() -> None:
        raise TimeoutError

    served = MetricsServer("127.0.0.1", 0, One(), is_alive=hangs)
    with contextlib.closing(served):
        assert get(f"http://127.0.0.1:{served.port}/livez")[0] == 503


def test_tls_with_a_renewed_certificate(tmp_path: Path) -> None:
    """Broken: scrapes fail from the day on which the first certificate expires."""
    authority = trustme.CA()
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)

    def issue() -> bytes:
        issued = authority.issue_cert("localhost", "127.0.0.1")
        (tmp_path / "tls.key").write_bytes(issued.private_key_pem.bytes())
        (tmp_path / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    def seen(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), BOUND_S) as plain,
            trusted.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            return secured.getpeercert(binary_form=True) or b""

    issue()
    served = MetricsServer("127.0.0.1", 0, One(), tmp_path)
    with contextlib.closing(served):
        with socket.create_connection(("127.0.0.1", served.port)):  # says nothing, and delays nobody
            assert get(f"https://127.0.0.1:{served.port}/metrics", trusted)[0] == 200
        fresh = issue()
        assert seen(served.port) == fresh
        (tmp_path / "tls.key").write_text("half of it")
        assert seen(served.port) == fresh


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    """Broken: metrics that should be encrypted are served in the clear."""
    with pytest.raises(AccessError, match=r"no usable tls\.crt"):
        MetricsServer("127.0.0.1", 0, One(), tmp_path)


def test_a_late_driver_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: a coordinator that starts before its driver ends, is ready too early, or fills the log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = settings_file.load({"metrics_port": port}, {})
    options = Options(RuntimeDir(tmp_path), driver_wait_ns=3_600_000_000_000)
    probed: list[tuple[int, int, int]] = []

    def discover() -> list[Device]:
        if len(probed) < 3:
            if caplog.records:
                paths = ("livez", "readyz", "metrics")
                live, ready, scraped = (get(f"http://127.0.0.1:{port}/{path}")[0] for path in paths)
                probed.append((live, ready, scraped))
            raise NoGpuError("no driver")
        return [Device(0, "GPU-0", "late", 1)]

    monkeypatch.setattr(main, "discover", discover)
    monkeypatch.setattr(main, "DRIVER_LOOK_S", 0.0)
    assert [device.name for device in main.wait_for_devices(settings, options)] == ["late"]
    assert probed == [(200, 503, 503)] * 3
    assert [record.getMessage() for record in caplog.records] == ["no driver; waiting up to 3600s for it"]
    with pytest.raises(OSError, match="refused"):
        get(f"http://127.0.0.1:{port}/livez")


def test_the_wait_for_a_driver_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a container that cannot see the new driver is never made again."""

    def discover() -> list[Device]:
        raise NoGpuError("no driver")

    monkeypatch.setattr(main, "discover", discover)
    monkeypatch.setattr(main, "DRIVER_LOOK_S", 0.0)
    for wait_ns in (0, 1):
        with pytest.raises(StartError, match="no driver"):
            main.wait_for_devices(settings_file.load({}, {}), Options(RuntimeDir(tmp_path), driver_wait_ns=wait_ns))
