"""A containerd for the tests of this folder."""

from tests.kubernetes.containerd.fixture import containerd

__all__ = ["containerd"]
