"""Two users of a real JupyterHub, configured as docs/how-to/jupyterhub says, share a simulated GPU.

Needs `pip install jupyterhub` and `npm install configurable-http-proxy`, the latter on PATH or named by
NVSHARE_TEST_HUB_PROXY.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from nvshare.simulated_gpu.environment import simulated_environment
from tests.chart.processes.pod import free_ports
from tests.conftest import ROOT
from tests.end_to_end.conftest import Node
from tests.jupyter.conftest import USE
from tests.waiting import BOUND_S, eventually

EXAMPLE: Final = ROOT / "docs" / "how-to" / "jupyterhub" / "jupyterhub_config.py"
PROXY: Final = os.environ.get("NVSHARE_TEST_HUB_PROXY") or shutil.which("configurable-http-proxy")
TOKEN: Final = uuid.uuid4().hex
CONFIGURATION: Final = """
exec(compile(open({example!r}).read(), {example!r}, "exec"))


def unix_user(spawner):
    return os.getuid()


import os
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = {folder!r} + "/{{username}}"
c.Spawner.args = ["--allow-root"]
c.Spawner.environment = {environment!r}
c.Spawner.env_keep = ["PATH", "PYTHONPATH"]
c.Spawner.start_timeout = c.Spawner.http_timeout = 240
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.JupyterHub.db_url = "sqlite:///" + {folder!r} + "/hub.sqlite"
c.JupyterHub.cookie_secret_file = {folder!r} + "/cookie_secret"
c.JupyterHub.services = [{{"name": "test", "api_token": {token!r}}}]
scopes = ["admin:users", "admin:servers", "access:servers"]
c.JupyterHub.load_roles = [{{"name": "test", "scopes": scopes, "services": ["test"]}}]
"""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("jupyterhub") is None, reason="pip install jupyterhub"),
    pytest.mark.skipif(shutil.which("node") is None, reason="JupyterHub's proxy needs node"),
    pytest.mark.skipif(PROXY is None, reason="npm install configurable-http-proxy; see the test's docstring"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes slots for users"),
]


@dataclass
class Hub:
    """The hub's API, with a token that may do all."""

    node: Node
    url: str

    def ask(self, path: str, method: str = "GET", **body: Any) -> Any:
        headers = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if method == "POST" else None
        with urlopen(Request(self.url + path, data, headers, method=method), timeout=BOUND_S) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def answers(self) -> bool:
        try:
            return bool(self.ask("/hub/api/"))
        except URLError:
            return False

    def spawn(self, user: str) -> None:
        """Logs a user in and waits for the user's notebook server."""
        (self.node.directory / user).mkdir()
        self.ask(f"/hub/api/users/{user}", "POST")
        self.ask(f"/hub/api/users/{user}/server", "POST")
        ready = f"the server of {user}\n{self.log()}"
        eventually(lambda: self.ask(f"/hub/api/users/{user}")["servers"].get("", {}).get("ready"), ready)

    def run(self, user: str, code: str) -> str:
        """Runs a cell in a new kernel of the user; what it printed."""
        import websocket  # of jupyter_server's requirements

        kernel = self.ask(f"/user/{user}/api/kernels", "POST", name="python3")["id"]
        channels = f"{self.url}/user/{user}/api/kernels/{kernel}/channels".replace("http", "ws", 1)
        link = websocket.create_connection(channels, header=[f"Authorization: token {TOKEN}"], timeout=BOUND_S)
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "s", "username": user}
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        message = {"header": {**header, "version": "5.3"}, "parent_header": {}, "metadata": {}, "content": content}
        link.send(json.dumps({**message, "channel": "shell"}))
        printed = ""
        while True:
            got = json.loads(link.recv())
            if got["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            assert got["msg_type"] != "error", got["content"]
            printed += got["content"]["text"] if got["msg_type"] == "stream" else ""
            if got["msg_type"] == "execute_reply":
                return printed

    def log(self) -> str:
        return (self.node.directory / "hub.log").read_text(errors="replace")[-6000:]


@pytest.fixture
def hub(node: Node) -> Iterator[Hub]:
    """A hub beside a coordinator with slots."""
    slots = node.directory / "slots"
    node.start_coordinator("--slots-dir", str(slots))
    port, hub_port, proxy_port = free_ports(3)
    simulated = simulated_environment(node.state, node.simulate, {})
    simulated.pop("NVSHARE_SIMULATE", None)
    configuration = node.directory / "jupyterhub_config.py"
    configuration.write_text(
        CONFIGURATION.format(
            example=str(EXAMPLE), folder=str(node.directory), environment=simulated, port=port, hub_port=hub_port,
            proxy_port=proxy_port, proxy=PROXY, token=TOKEN,
        )
    )  # fmt: skip
    environment = node.environment() | {"NVSHARE_SLOTS_DIR": str(slots)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (node.directory / "hub.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterhub", "--config", str(configuration)],
            cwd=node.directory, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    made = Hub(node, f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: made.answers() or process.poll() is not None, "the hub answers")
        assert process.poll() is None, made.log()
        yield made
    finally:
        process.terminate()  # it ends its proxy and all servers
        process.wait()


def test_two_users_share_a_gpu_in_their_slots(hub: Hub) -> None:
    """Broken: notebooks of a hub run outside of nvshare, are not told apart, or lack their limits."""
    for user in ("alice", "bob"):
        hub.spawn(user)
        assert hub.run(user, USE + "print('used')") == "used\n"
    seen = {client["group"]: client for client in hub.node.control("clients")["clients"]}
    assert sorted(group.rpartition("-")[0] for group in seen) == ["hub-alice", "hub-bob"]
    for client in seen.values():
        (seat,) = client["seats"]
        assert (client["job_class"], client["share_limit"]) == ("interactive", 0.5)
        assert seat["limit_bytes"] == 8 << 30
        assert seat["allocated_bytes"] >= 64 << 20
    hub.ask("/hub/api/users/alice/server", "DELETE")
    eventually(lambda: len(hub.node.control("clients")["clients"]) == 1, "the stopped server's kernel is gone")
