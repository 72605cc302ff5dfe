"""The webhook's server over real TLS: reviews, bounds, certificates that change, an end in order.

Non-goals: what reviews mean; the command line (test_admission_command.py).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from nvshare.coordinator.kubernetes.cluster.admission_handler import MAX_BODY_BYTES, MAX_VALUES
from nvshare.coordinator.kubernetes.cluster.admission_metrics import Metrics
from nvshare.coordinator.kubernetes.cluster.admission_review import Settings
from nvshare.coordinator.kubernetes.cluster.admission_server import MAX_BODIES_BYTES, BoundedServer, Limits
from nvshare.coordinator.system.http.certificate import Certificate, CertificateError
from tests.kubernetes.cluster.pod_shapes import RULES, container, pod, review
from tests.waiting import BOUND_S, eventually

REVIEW = json.dumps(review(pod(container(env=[{"name": "LD_PRELOAD", "value": "a.so"}])))).encode()
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /mutate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(REVIEW)


class Site:
    """A server with a certificate of an authority of its own, and its clients."""

    def __init__(self, folder: Path, limits: Limits | None = None, rules: Any = RULES) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.metrics = Metrics()
        self.issue()
        self.certificate = Certificate(folder, self.metrics.failed_reloads.inc)
        self.server = BoundedServer(
            ("127.0.0.1", 0), Settings(rules), self.metrics, certificate=self.certificate, limits=limits
        )
        self.server.start()
        self.opened: list[Any] = []

    def issue(self) -> None:
        """A new certificate in the place of the one before."""
        made = self.authority.issue_cert("localhost", "127.0.0.1")
        (self.folder / "tls.key").write_bytes(made.private_key_pem.bytes())
        (self.folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context

    def plain(self) -> socket.socket:
        """A connection without TLS yet."""
        made = socket.create_connection(("127.0.0.1", self.server.port), BOUND_S)
        self.opened.append(made)
        return made

    def secure(self) -> ssl.SSLSocket:
        """A connection with TLS; tried again where the server's deadline is shorter than a busy machine needs."""
        for _ in range(50):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                made = self.context().wrap_socket(self.plain(), server_hostname="localhost")
                self.opened.append(made)
                return made
        raise AssertionError("the server ends every handshake")

    def client(self) -> http.client.HTTPSConnection:
        """One that speaks HTTP."""
        made = http.client.HTTPSConnection("localhost", self.server.port, timeout=BOUND_S, context=self.context())
        self.opened.append(made)
        return made

    def ask(
        self, client: http.client.HTTPSConnection, body: bytes = REVIEW, path: str = "/mutate"
    ) -> tuple[int, bytes]:
        client.request("POST", path, body, JSON)
        answer = client.getresponse()
        return answer.status, answer.read()

    def serves(self) -> bool:
        """Whether a new client is served; tried again, as above."""
        for _ in range(50):
            with contextlib.suppress(ssl.SSLError, ConnectionError, http.client.HTTPException):
                return self.ask(self.client())[0] == 200
        return False

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        for connection in self.opened:
            connection.close()
        self.server.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.closing(Site(tmp_path)) as made:
        yield made


QUICK = Limits(handshake_s=0.3, request_s=0.3, idle_s=0.3, closing_s=5.0)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Site]:
    """A site with short deadlines."""
    with contextlib.closing(Site(tmp_path, QUICK)) as made:
        yield made


def ended(connection: socket.socket) -> bool:
    """Whether the server ends the connection, whatever it says before; fails after the bound."""
    try:
        while connection.recv(65_536):
            pass
    except (ConnectionError, ssl.SSLError):
        return True
    return True


def test_reviews_are_answered_on_one_connection(site: Site) -> None:
    """The API server keeps its connections; a handshake for each pod would cost more than the answer."""
    client = site.client()
    for path in ("/mutate?timeout=2s", "/validate?timeout=2s", "/mutate"):
        status, body = site.ask(client, path=path)
        assert status == 200
        response = json.loads(body)["response"]
        assert response["allowed"] is True
        assert ("patch" in response) == path.startswith("/mutate")
    assert json.loads(base64.b64decode(response["patch"]))
    assert client.sock is not None
    assert site.count("nvshare_admission_reviews_total", endpoint="/mutate", outcome="patched") == 2
    assert site.count("nvshare_admission_reviews_total", endpoint="/validate", outcome="unchanged") == 1


def test_certificate_is_checked_by_its_name(site: Site) -> None:
    """The API server checks it; a server that speaks no proper TLS would never be asked."""
    with pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(site.plain(), server_hostname="localhost")
    eventually(
        lambda: site.count("nvshare_admission_dropped_connections_total", reason="tls") == 1, "a counted refusal"
    )


WRONG: dict[str, tuple[bytes, str, int]] = {
    "not JSON": (b"{", "/mutate", 400),
    "not UTF-8": (b'"\xff"', "/mutate", 400),
    "deep": (b"[" * 100_000, "/mutate", 400),
    "many values": (b"[" + b"[]," * MAX_VALUES + b"[]]", "/mutate", 413),
    "a long number": (b"9" * 100_000, "/mutate", 400),
    "no review": (b"{}", "/mutate", 400),
    "an old version": (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}', "/validate", 400),
    "empty": (b"", "/mutate", 400),
    "another page": (REVIEW, "/convert", 404),
}


@pytest.mark.parametrize(("body", "path", "status"), WRONG.values(), ids=WRONG.keys())
def test_wrong_requests_are_refused(site: Site, body: bytes, path: str, status: int) -> None:
    """An answer that is no review lets the pod through; it must be an answer, not a hang."""
    assert site.ask(site.client(), body, path)[0] == status
    assert site.serves()


HEADERS: dict[str, tuple[bytes, bytes]] = {
    "no length": (b"Content-Type: application/json", b"411"),
    "chunks": (b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nContent-Length: 2", b"411"),
    "a negative length": (b"Content-Type: application/json\r\nContent-Length: -1", b"411"),
    "a length in other digits": ("Content-Type: application/json\r\nContent-Length: ٣".encode(), b"411"),
    "too long": (b"Content-Type: application/json\r\nContent-Length: %d" % (MAX_BODY_BYTES + 1), b"413"),
    "absurdly long": (b"Content-Type: application/json\r\nContent-Length: " + b"9" * 5000, b"413"),
    "another type": (b"Content-Type: application/x-protobuf\r\nContent-Length: 2", b"415"),
    "too many headers": (b"\r\n".join(b"A%d: b" % number for number in range(200)), b"431"),
}


@pytest.mark.parametrize(("headers", "status"), HEADERS.values(), ids=HEADERS.keys())
def test_wrong_headers_are_refused_before_the_body(site: Site, headers: bytes, status: bytes) -> None:
    """What is too long must not be read into memory first."""
    connection = site.secure()
    connection.sendall(b"POST /mutate HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n")
    assert connection.recv(65_536).split()[1] == status
    assert ended(connection)
    assert site.serves()


def test_bodies_together_are_bounded(site: Site) -> None:
    """Clients that announce a lot and send it slowly must not fill the memory; others wait for nobody."""
    head = b"POST /mutate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % MAX_BODY_BYTES
    slow = [site.secure() for _ in range(MAX_BODIES_BYTES // MAX_BODY_BYTES)]
    for connection in slow:
        connection.sendall(head)
    eventually(lambda: site.server.reserved_bytes == MAX_BODIES_BYTES, "all of it taken")
    assert site.ask(site.client())[0] == 503
    slow[0].close()
    eventually(lambda: site.server.reserved_bytes < MAX_BODIES_BYTES, "some of it back")
    assert site.serves()


def test_large_pod_is_answered(site: Site) -> None:
    """A pod may have 1.5 MiB; refusing it would leave it without the hook."""
    big = review(pod(container(env=[{"name": f"V{n}", "value": "x" * 1000} for n in range(1500)]), annotations={}))
    assert site.ask(site.client(), json.dumps(big).encode())[0] == 200


def test_not_tls_is_dropped(site: Site) -> None:
    """A port scanner must not cost more than a connection."""
    connection = site.plain()
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert ended(connection)
    eventually(lambda: site.count("nvshare_admission_dropped_connections_total", reason="tls") == 1, "a counted drop")
    assert site.serves()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.sampled_from([b"\r\n" * 50, b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]))
def test_any_bytes_are_survived(hasty: Site, sent: bytes) -> None:
    """Whatever comes in through TLS ends within its deadline and leaves nothing behind."""
    connection = hasty.secure()
    with contextlib.suppress(OSError):  # it was ended already
        connection.sendall(sent)
    assert ended(connection)
    connection.close()
    eventually(lambda: not hasty.server.open_connections, "no connection left")


def test_slow_clients_are_cut_off(hasty: Site) -> None:
    """One that sends a byte a minute would otherwise hold a thread for ever; meanwhile others are served."""
    header = b"POST /mutate HTTP/1.1\r\nContent-Le"
    body = b"POST /mutate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    slow: list[socket.socket] = [hasty.plain()]
    for part in (header, body):
        connection = hasty.secure()
        with contextlib.suppress(OSError):  # it was ended already
            connection.sendall(part)
        slow.append(connection)
    assert hasty.serves()
    assert all(ended(connection) for connection in slow)
    eventually(lambda: hasty.count("nvshare_admission_dropped_connections_total", reason="slow") >= 3, "three drops")
    eventually(lambda: not hasty.server.open_connections, "no connection left")


def test_idle_connections_end(hasty: Site) -> None:
    """An API server that went away without a word must not keep its place for ever."""
    assert hasty.serves()
    client = hasty.opened[-1]
    assert client.sock is None or ended(client.sock)
    eventually(lambda: hasty.count("nvshare_admission_dropped_connections_total", reason="idle") >= 1, "a counted drop")


def test_connections_are_bounded(tmp_path: Path) -> None:
    """A thousand connections must not become a thousand threads; a place that is free again is used."""
    with contextlib.closing(Site(tmp_path, Limits(connections=2))) as site:
        first, second = site.client(), site.client()
        assert site.ask(first)[0] == site.ask(second)[0] == 200
        assert ended(site.plain())
        assert site.count("nvshare_admission_dropped_connections_total", reason="too_many") == 1
        first.close()
        eventually(lambda: len(site.server.open_connections) == 1, "a free place")
        assert site.serves()


def test_our_own_mistake_lets_the_pod_through(tmp_path: Path) -> None:
    """An exception must become an answer that fails open, and the server must go on."""
    with contextlib.closing(Site(tmp_path, rules=None)) as site:
        assert [site.ask(site.client())[0] for _ in range(2)] == [500, 500]
        assert site.count("nvshare_admission_reviews_total", endpoint="/mutate", outcome="failed") == 2


def serial(site: Site) -> str:
    """Serial number of the certificate that a new connection gets."""
    connection = site.secure()
    found = connection.getpeercert()
    assert found is not None
    return str(found["serialNumber"])


def test_new_certificate_is_taken(site: Site) -> None:
    """cert-manager renews it; without a restart the API server would stop to trust us on the day the old one ends."""
    client = site.client()
    assert site.ask(client)[0] == 200
    before = serial(site)
    site.issue()
    assert serial(site) != before
    assert site.ask(client)[0] == 200  # the connection from before goes on


def test_half_a_certificate_changes_nothing(site: Site) -> None:
    """Files are replaced one after the other: a key that does not fit yet must not end the service."""
    before = serial(site)
    intact = (site.folder / "tls.crt").read_bytes()
    for broken in (b"", intact[:100], trustme.CA().issue_cert("localhost").cert_chain_pems[0].bytes()):
        (site.folder / "tls.crt").write_bytes(broken)
        assert [serial(site), serial(site)] == [before, before]
    (site.folder / "tls.crt").unlink()
    assert serial(site) == before
    assert site.count("nvshare_admission_failed_certificate_reloads_total") == 4  # once for each change
    site.issue()
    assert serial(site) != before


def test_no_certificate_is_said_at_the_start(tmp_path: Path) -> None:
    """A pod that waits without TLS would look healthy and never answer."""
    with pytest.raises(CertificateError, match=r"no usable tls\.crt and tls\.key"):
        BoundedServer(("127.0.0.1", 0), Settings(), Metrics(), certificate=Certificate(tmp_path, lambda: None))


def get(client: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    with contextlib.closing(client):
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read().decode()


def in_the_clear(server: BoundedServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND_S)


def test_probes_and_metrics(site: Site) -> None:
    """The kubelet asks in the clear, Prometheus too; reviews are served over TLS only."""
    with contextlib.closing(BoundedServer(("127.0.0.1", 0), site.server.settings, site.metrics)) as probes:
        probes.start()
        assert site.serves()
        assert get(in_the_clear(probes), "/healthz") == (200, "ok\n")
        assert get(site.client(), "/healthz") == (200, "ok\n")
        assert get(site.client(), "/metrics")[0] == 404
        client = in_the_clear(probes)
        client.request("POST", "/mutate", REVIEW, JSON)
        assert client.getresponse().status == 404
        client.close()
        names = {family.name for family in text_string_to_metric_families(get(in_the_clear(probes), "/metrics")[1])}
        assert {"nvshare_admission_reviews", "nvshare_admission_seconds"} <= names
        probes.leave()
        assert get(in_the_clear(probes), "/healthz") == (503, "leaving\n")


def test_leaving_still_answers(site: Site) -> None:
    """For some seconds after SIGTERM the cluster still sends reviews here."""
    client = site.client()
    assert site.ask(client)[0] == 200
    site.server.leave()
    assert site.ask(client)[0] == 200
    assert client.sock is None  # told to close: the next one opens elsewhere
    assert site.serves()


def test_close_answers_what_was_begun(site: Site) -> None:
    """An upgrade must not lose a review whose body is on its way."""
    idle, busy, port = site.client(), site.secure(), site.server.port
    assert site.ask(idle)[0] == 200
    eventually(lambda: site.server.busy_connections == 0, "the first one is idle")
    busy.sendall(HEAD + REVIEW[:10])
    eventually(lambda: site.server.busy_connections == 1, "the request has begun")
    closing = threading.Thread(target=site.server.close)
    closing.start()
    assert idle.sock is not None
    assert ended(idle.sock)
    busy.sendall(REVIEW[10:])
    assert busy.recv(65_536).startswith(b"HTTP/1.1 200 ")
    assert ended(busy)
    closing.join(BOUND_S)
    assert not closing.is_alive()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), BOUND_S)


def test_close_answers_what_has_been_received(tmp_path: Path) -> None:
    """Nor one that is there as a whole, and whose thread has not looked yet."""
    for _ in range(20):
        site = Site(tmp_path)
        waiting = site.secure()
        waiting.sendall(HEAD + REVIEW)
        site.server.close()
        assert waiting.recv(65_536).startswith(b"HTTP/1.1 200 ")
        site.close()


def test_close_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A client that never ends its request must not hold up an upgrade."""
    site = Site(tmp_path, replace(Limits(), closing_s=0.2))
    busy = site.secure()
    busy.sendall(b"POST /mutate HTTP/1.1\r\nContent-Le")
    eventually(lambda: site.server.busy_connections == 1, "the request has begun")
    site.server.close()
    assert ended(busy)
    busy.close()
