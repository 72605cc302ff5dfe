"""The fixture `containerd`: import it in a conftest."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.kubernetes.containerd.runtime import Containerd, unavailable


@pytest.fixture(scope="module")
def containerd() -> Iterator[Containerd]:
    """A containerd for the tests of a module; skips where none can run a pod."""
    if why := unavailable():
        pytest.skip(why)
    running = Containerd()
    try:
        try:
            running.remove_pod(running.pod("probe"))
        except grpc.RpcError as error:
            pytest.skip(f"containerd runs no pod here: {error.details()}")
        yield running
    finally:
        running.close()
