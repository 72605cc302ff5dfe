"""Two notebooks on a simulated GPU, side by side in a real JupyterLab and a headless browser."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.browser import Browser, browser
from tests.end_to_end.conftest import Node, new_node
from tests.waiting import BOUND_S, eventually

KERNEL: Final = "Python 3 (shared GPU)"
TRAIN: Final = "train.ipynb"
EXPLORE: Final = "explore.ipynb"
SETUP: Final = "import cupy\n%load_ext nvshare\nx = cupy.ones((4096, 4096))\nx.shape"
NOTEBOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    TRAIN: (SETUP, "%gpu", "while True:\n    x = x * 0.999 + 0.001"),
    EXPLORE: (SETUP, "%gpu", 'x = x * 2\nprint("done")'),
}
"""File, and its cells."""
BUSY: Final = {"NVSHARE_SIM_KERNEL_NS": "200000000", "NVSHARE_SIM_LAUNCH_QUEUE": "25"}
"""Kernels so long that the GPU has work for 5 s when the loop gets no processor."""
WITHOUT_NEWS: Final = {"fetchNews": "false", "checkForUpdates": False}


def write_notebooks(folder: Path) -> None:
    """As JupyterLab saves them."""
    folder.mkdir()
    kernel = {"name": "nvshare", "display_name": KERNEL, "language": "python"}
    empty: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    for name, sources in NOTEBOOKS.items():
        cells = [{**empty, "id": f"cell-{at}", "source": source} for at, source in enumerate(sources)]
        made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        (folder / name).write_text(json.dumps(made), encoding="utf-8")


def workspace() -> dict[str, Any]:
    """JupyterLab's layout: the notebooks side by side, without the file browser."""
    areas = [{"type": "tab-area", "currentIndex": 0, "widgets": [f"notebook:{name}"]} for name in NOTEBOOKS]
    dock = {"type": "split-area", "orientation": "horizontal", "sizes": [0.5, 0.5], "children": areas}
    collapsed = {"collapsed": True, "visible": True, "widgets": []}
    layout = {"main": {"dock": dock, "current": f"notebook:{TRAIN}"}, "left": collapsed, "right": collapsed}
    opened = {f"notebook:{name}": {"data": {"path": name, "factory": "Notebook"}} for name in NOTEBOOKS}
    return {"metadata": {"id": "default"}, "data": {"layout-restorer:data": layout, **opened}}


def environment(node: Node) -> dict[str, str]:
    """Jupyter's, with everything that it writes in the node's directory."""
    folders = {
        "JUPYTER_DATA_DIR": "jupyter",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "servers",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
        "CUPY_CACHE_DIR": "cupy",
    }
    made = node.environment() | {name: str(node.directory / folder) for name, folder in folders.items()}
    made |= {"NVSHARE_SIMULATE": node.simulate, "JUPYTER_PREFER_ENV_PATH": "0"}  # no kernel of this environment
    made.pop("PYTEST_CURRENT_TEST", None)  # with it a kernel does not show its standard error
    return made | BUSY


def save_workspace(url: str, token: str) -> bool:
    """False if the server does not listen yet, although it has written its address."""
    save = urllib.request.Request(
        f"{url}lab/api/workspaces/default",
        json.dumps(workspace()).encode(),
        {"Authorization": f"token {token}", "Content-Type": "application/json"},
        method="PUT",
    )
    try:
        urllib.request.urlopen(save, timeout=BOUND_S).close()
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError:
        return False
    return True


@contextlib.contextmanager
def server(node: Node) -> Iterator[str]:
    """JupyterLab with the notebooks and the kernel; the address with its token."""
    write_notebooks(node.directory / "notebooks")
    news = node.directory / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps(WITHOUT_NEWS), encoding="utf-8")
    variables, token = environment(node), secrets.token_hex()
    install = [sys.executable, "-m", "nvshare.coordinator.cli.ctl", "kernelspec", "install", "--user", "--limit=1GiB"]
    subprocess.run(install, env=variables, stdout=subprocess.DEVNULL, check=True)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    with (node.directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--IdentityProvider.token={token}"], cwd=node.directory / "notebooks", env=variables,
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        servers = node.directory / "servers"
        (file,) = eventually(lambda: list(servers.glob("jpserver-*.json")), "a server")
        url = json.loads(eventually(file.read_text, "the server's address"))["url"]
        eventually(lambda: save_workspace(url, token), "a server that answers")
        yield f"{url}lab?token={token}"
    finally:
        process.terminate()  # the server ends its kernels
        process.wait()


@dataclass
class Lab:
    """The page, as a person uses it."""

    node: Node
    page: Browser

    def run(self, notebook: str, cell: int) -> None:
        """Selects a cell and presses Ctrl+Enter."""
        self._select(notebook, cell)
        self.page.press("Enter", 13, control=True)

    def interrupt(self, notebook: str) -> None:
        """Presses `i` twice."""
        self._select(notebook, 0)
        for _ in range(2):
            self.page.press("i", 73)

    def output(self, notebook: str, cell: int) -> str:
        """Output below a cell."""
        cells = f"{panel(notebook)}.querySelectorAll('.jp-CodeCell')"
        return str(self.page.evaluate(f"{cells}[{cell}].querySelector('.jp-OutputArea').innerText"))

    def await_output(self, notebook: str, cell: int, part: str) -> str:
        """Output below a cell, as soon as it has this part."""
        eventually(lambda: part in self.output(notebook, cell), f"{part!r} below cell {cell} of {notebook}")
        return self.output(notebook, cell)

    def await_kernel(self, notebook: str) -> None:
        """Until the toolbar shows an idle kernel that shares the GPU."""
        kernel = f"{panel(notebook)}?.querySelector('.jp-Toolbar-kernelName')?.innerText === {KERNEL!r}"
        idle = f"{panel(notebook)}.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'"
        eventually(lambda: self.page.evaluate(f"{kernel} && {idle}"), f"an idle kernel of {notebook}")

    def await_kernels(self, notebook: str, count: int) -> None:
        """Until the GPU has run so many kernels of a notebook."""

        def done() -> int:
            clients = self.node.control("clients")["clients"]
            seats = [seat for client in clients if client["name"] == notebook for seat in client["seats"]]
            return sum(int(seat["progress_work"]) for seat in seats)

        eventually(lambda: done() >= count, f"{count} kernels of {notebook}")

    def _select(self, notebook: str, cell: int) -> None:
        self.page.click(f"{panel(notebook)}.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[{cell}]")


def panel(notebook: str) -> str:
    """The script that finds the panel of a notebook: its tab names it."""
    tabs = "[...document.querySelectorAll('.lm-DockPanel-tabBar .lm-TabBar-tab')]"
    return f"document.getElementById({tabs}.find((tab) => tab.innerText.trim() === {notebook!r})?.dataset.id)"


@contextlib.contextmanager
def opened(executable: str) -> Iterator[Lab]:
    """Both notebooks in a browser, with idle kernels, on a GPU with turns of ten minutes."""
    with new_node() as node:
        node.start_coordinator("--quantum=10min", variables={"NVSHARE_PACING_BUDGET": "10s"})
        with server(node) as address, browser(executable) as page:
            page.size(1440, 490)
            page.open(address)
            made = Lab(node, page)
            for notebook in NOTEBOOKS:
                made.await_kernel(notebook)
            yield made


def share(lab: Lab) -> None:
    """Both notebooks use the GPU and show its state; then `train` keeps the GPU and a cell of `explore` waits."""
    for notebook in NOTEBOOKS:
        lab.run(notebook, 0)
    for notebook in NOTEBOOKS:
        lab.await_output(notebook, 0, "(4096, 4096)")
    for notebook in NOTEBOOKS:
        lab.run(notebook, 1)
        lab.await_output(notebook, 1, "memory 128MiB of 1GiB")
    lab.run(TRAIN, 2)
    lab.await_kernels(TRAIN, 4)  # the loop is compiled and keeps the GPU busy
    lab.run(EXPLORE, 2)
    lab.await_output(EXPLORE, 2, "waiting for GPU 0")
