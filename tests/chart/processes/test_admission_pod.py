"""The admission Deployment as a real process, asked as the API server would ask: by the rendered configuration alone.

Non-goals: what reviews mean (tests/kubernetes).
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
import trustme

from tests.chart.conftest import Rendered, render
from tests.chart.processes.pod import Pod, free_ports, running
from tests.conftest import Built
from tests.kubernetes.cluster.pod_shapes import container, pod, review
from tests.waiting import eventually

HOST = "gpu-nvshare-admission.nvshare.svc"
"""The host that the API server connects to, and checks the certificate for: NAME.NAMESPACE.svc of the service."""


@pytest.fixture
def webhook(built: Built) -> Iterator[tuple[Rendered, Pod, int]]:
    """The server's pod with a certificate of an authority that only `caBundle` names."""
    authority = trustme.CA()
    made = authority.issue_cert(HOST)
    port, metrics = free_ports(2)
    values = {
        "priorityClasses": {"production": 50},
        "admission": {
            "mode": "webhook",
            "enforce": True,
            "webhook": {
                "port": port,
                "metricsPort": metrics,
                "tlsSecret": "theirs",
                "caBundle": base64.b64encode(authority.cert_pem.bytes()).decode(),
            },
        },
    }
    rendered = render(values)
    (settings,) = [d for d in rendered.all("ConfigMap") if "priority-classes.json" in d["data"]]
    secret = {
        "tls.key": made.private_key_pem.bytes().decode(),
        "tls.crt": b"".join(blob.bytes() for blob in made.cert_chain_pems).decode(),
    }
    spec = {"initContainers": [], **rendered.one("Deployment")["spec"]["template"]["spec"]}
    maps = {settings["metadata"]["name"]: settings["data"], "theirs": secret}
    with running(spec, built, maps) as server:
        yield rendered, server, port


def ask(configuration: dict[str, Any], port: int, asked: dict[str, Any]) -> dict[str, Any]:
    """One review, to the path and by the authority that the configuration names."""
    (hook,) = configuration["webhooks"]
    client = hook["clientConfig"]
    service = client["service"]
    assert f"{service['name']}.{service['namespace']}.svc" == HOST
    context = ssl.create_default_context(cadata=base64.b64decode(client["caBundle"]).decode())
    with (
        socket.create_connection(("127.0.0.1", port), 30) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as secure,
    ):
        connection = http.client.HTTPConnection(HOST)
        connection.sock = secure
        connection.request("POST", service["path"], json.dumps(asked), {"Content-Type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    return answer


def review_of(annotations: dict[str, str]) -> dict[str, Any]:
    """A pod with a slot, a priority class and a preload of its own."""
    own = container(env=[{"name": "LD_PRELOAD", "value": "/usr/lib/libjemalloc.so"}])
    return review(pod(own, annotations=annotations, priorityClassName="production"))


def healthy(server: Pod, port: int) -> bool:
    """The liveness probe."""
    assert server.running["admission"].poll() is None, server.log(server.spec["containers"][0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_the_configuration_reaches_the_server(webhook: tuple[Rendered, Pod, int]) -> None:
    """Service, certificate, paths, files and options must fit together, or every review fails open, unnoticed."""
    rendered, server, port = webhook
    (only,) = server.spec["containers"]
    (metrics,) = [each["containerPort"] for each in only["ports"] if each["name"] == "metrics"]
    eventually(functools.partial(healthy, server, metrics), "the answer to the liveness probe")
    mutated = ask(rendered.one("MutatingWebhookConfiguration"), port, review_of({}))["response"]
    assert mutated["allowed"] is True
    patch = base64.b64decode(mutated["patch"]).decode()
    assert "/usr/lib/libjemalloc.so" in patch
    assert "libnvshare_hook.so" in patch
    assert '"50"' in patch, "the priority class, from the mounted file"
    checked = ask(rendered.one("ValidatingWebhookConfiguration"), port, review_of({"nvshare.com/priority": "high"}))
    assert checked["response"]["allowed"] is False
    assert "nvshare.com/priority" in checked["response"]["status"]["message"]
    (service,) = [each for each in rendered.all("Service") if each["metadata"]["name"].endswith("-admission")]
    assert HOST.startswith(f"{service['metadata']['name']}.{service['metadata']['namespace']}.")
    assert server.stop() == {"admission": 0}
