"""Jupyter kernels on simulated GPUs, driven as a notebook drives them."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.cli import ctl
from tests.conftest import Built
from tests.end_to_end.conftest import Node, new_node
from tests.waiting import BOUND_S

USE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(driver, name)(*arguments)
    assert result == 0, (name, result)
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(64 << 20))
def work():
    call("cuMemsetD8_v2", memory, ctypes.c_ubyte(1), ctypes.c_size_t(64 << 20))
work()
"""
"""A cell that uses the GPU without a library, and prints nothing."""


@dataclass
class Notebook:
    """One kernel.  `run` executes a cell and returns what it printed; `begin` only starts it."""

    manager: Any
    client: Any
    printed: list[str] = field(default_factory=list)
    error: str = ""
    """The name of the exception of the last cell."""

    def begin(self, code: str) -> str:
        self.printed, self.error = [], ""
        found: str = self.client.execute(code)
        return found

    def listen(self, until: Callable[[dict[str, Any]], bool]) -> str:
        """Reads the cell's output until a message is the expected one."""
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=BOUND_S)
            except queue.Empty:
                pytest.fail(f"the kernel says nothing more; so far: {self.printed}")
            content = message["content"]
            if message["msg_type"] == "stream":
                self.printed.append(content["text"])
            elif message["msg_type"] == "error":
                self.error = content["ename"]
            if until(message):
                return "".join(self.printed)

    def end(self, request: str) -> str:
        """Waits for the end of the cell."""
        return self.listen(
            lambda message: (
                message["msg_type"] == "status"
                and message["content"]["execution_state"] == "idle"
                and message["parent_header"].get("msg_id") == request
            )
        )

    def run(self, code: str) -> str:
        return self.end(self.begin(code))


@pytest.fixture
def node(built: Built) -> Iterator[Node]:
    """One simulated GPU with a coordinator in exclusive turns."""
    with new_node() as made:
        yield made


@pytest.fixture
def specs(node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the kernel `nvshare`, as `nvshare-ctl kernelspec install --user` makes it."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(node.directory / "jupyter"))
    with pytest.raises(SystemExit) as ended:
        ctl.main(["kernelspec", "install", "--user", "--limit=1GiB"])
    assert ended.value.code == 0
    return node.directory / "jupyter" / "kernels"


@contextlib.contextmanager
def started_kernel(kernels: Path, environment: dict[str, str]) -> Iterator[Notebook]:
    """A kernel `nvshare` of a directory of kernels."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="nvshare", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(kernels)]))
    manager.start_kernel(env=environment, cwd=environment["NVSHARE_RUNTIME_DIR"])
    try:
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=BOUND_S)
        yield Notebook(manager, client)
    finally:
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


@pytest.fixture
def notebook(node: Node, specs: Path) -> Iterator[Callable[[], Notebook]]:
    """Starts a kernel."""
    environment = node.environment() | {"NVSHARE_SIMULATE": node.simulate}
    environment.pop("PYTEST_CURRENT_TEST", None)  # with it a kernel does not show its standard error
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(started_kernel(specs, environment))
