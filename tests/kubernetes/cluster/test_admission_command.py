"""`nvshare-admission` as a process: from the command line to SIGTERM.

Non-goals: what reviews mean, how they are served.
"""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from nvshare.coordinator.kubernetes.cluster import admission
from tests.conftest import ROOT
from tests.kubernetes.cluster.pod_shapes import PRIORITY_CLASS_VALUES, container, pod, review
from tests.waiting import BOUND_S, eventually


class Process:
    """A running `nvshare-admission`, and where it listens."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.authority = trustme.CA()
        made = self.authority.issue_cert("localhost")
        (folder / "tls.key").write_bytes(made.private_key_pem.bytes())
        (folder / "tls.crt").write_bytes(made.cert_chain_pems[0].bytes())
        words = [
            sys.executable,
            "-m",
            "nvshare.coordinator.kubernetes.cluster.admission",
            "--certificate-dir",
            str(folder),
        ]
        words += ["--port", "0", "--metrics-port", "0", "--address", "127.0.0.1", *options]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(words, stderr=log, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        found = eventually(self._ports, "the ports in its log")
        assert found is not None
        self.port, self.metrics_port = int(found[1]), int(found[2])

    def _ports(self) -> re.Match[str] | None:
        assert self.process.poll() is None, self.log()
        return re.search(r"reviews on port (\d+), metrics on port (\d+)", self.log())

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def ask(self, path: str, made: object) -> dict[str, object]:
        """The response to a review."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        request = urllib.request.Request(
            f"https://localhost:{self.port}{path}", json.dumps(made).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=BOUND_S, context=context) as answer:
            found: dict[str, object] = json.load(answer)["response"]
        return found

    def page(self, path: str) -> tuple[int, str]:
        """A page of the plain port."""
        try:
            with urllib.request.urlopen(f"http://localhost:{self.metrics_port}{path}", timeout=BOUND_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(BOUND_S)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Process]:
    classes = tmp_path / "classes.json"
    classes.write_text(json.dumps(PRIORITY_CLASS_VALUES), encoding="utf-8")
    made = Process(tmp_path, "--enforce", f"--priority-classes={classes}", "--priority-range=-5:5", "--leave=1h")
    yield made
    made.close()


def test_serves_with_its_options(running: Process) -> None:
    """An option that is accepted and does nothing is worse than none."""
    assert running.page("/healthz") == (200, "ok\n")
    own = container(env=[{"name": "LD_PRELOAD", "value": "a.so"}])
    assert "patch" in running.ask("/mutate?timeout=2s", review(pod(own, priorityClassName="production")))
    refused = running.ask("/validate", review(pod(annotations={"nvshare.com/priority": "6"})))
    assert refused["allowed"] is False
    assert "from -5 to 5" in json.dumps(refused)
    assert running.ask("/validate", review(pod(annotations={"nvshare.com/priority": "5"})))["allowed"] is True
    assert 'nvshare_admission_reviews_total{endpoint="/validate",outcome="refused"} 1.0' in running.page("/metrics")[1]


def test_leaves_in_order(running: Process) -> None:
    """After SIGTERM probes fail while reviews are still answered; a second signal ends it at once."""
    running.process.send_signal(signal.SIGTERM)
    eventually(lambda: running.page("/healthz") == (503, "leaving\n"), "a failing probe")
    assert running.ask("/mutate", review(pod()))["allowed"] is True
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait() == 0
    assert "Traceback" not in running.log()


BAD: dict[str, tuple[list[str], str]] = {
    "no certificate": (["--certificate-dir", "/nonexistent"], "--certificate-dir: /nonexistent: no usable tls.crt"),
    "range": (["--priority-range", "1"], '--priority-range: "1": write MIN:MAX'),
    "resource": (["--resource", "gpu"], '--resource: "gpu": write DOMAIN/NAME'),
    "classes": (["--priority-classes", "/nonexistent"], "--priority-classes: /nonexistent: No such file"),
    "hook": (["--hook-path", "lib.so"], "--hook-path: 'lib.so': write an absolute path"),
    "hook with a colon": (["--hook-path", "/a:b"], "--hook-path: '/a:b': write an absolute path"),
    "level": (["--log-level", "loud"], "--log-level: 'loud' is none of debug, info"),
    "leave": (["--leave", "soon"], "--leave: 'soon' is not a duration"),
}


@pytest.mark.parametrize(("options", "text"), BAD.values(), ids=BAD.keys())
def test_bad_options_are_named(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator reads this in the log of a pod that does not start."""
    with pytest.raises(SystemExit) as ended:
        admission.main(options)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"nvshare-admission: {text}")


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"a": {"class": "gold"}}'])
def test_bad_class_files_are_named(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for a file that the chart did not write."""
    file = tmp_path / "classes.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        admission.main(["--priority-classes", str(file)])
    assert ended.value.code == 2
    assert "--priority-classes: " in capsys.readouterr().err
