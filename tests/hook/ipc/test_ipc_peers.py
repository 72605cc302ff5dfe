"""Memory of mode `swap` that one GPU of a program has opened (cuIpcOpenMemHandle), and that another one works on.

A driver's own memory of that kind is copied for any GPU, and reached by kernels with peer access; ours is mapped for
the GPU that opened it.
"""

from __future__ import annotations

from tests.end_to_end.two_gpus import COPIES
from tests.hook.ipc.test_ipc import StartImporter, environment, exported, exporter, importer, opened
from tests.hook.memory.test_memory_process import Client
from tests.hook.swap.test_swap_process import MIB

__all__ = ["environment", "exporter", "importer"]

SIZE = 20 * MIB
ILLEGAL_ADDRESS = 700


def second_gpu(guest: Client) -> int:
    """Memory on GPU 1, which is current afterwards."""
    assert guest.ask("use", 1) == 0
    result, pointer = guest.ask("alloc", SIZE)
    assert result == 0
    return int(pointer)


def test_another_gpu_copies_what_was_opened(exporter: Client, importer: StartImporter) -> None:
    """Broken: a consumer that moves a shared tensor to its own GPU is told that the argument is invalid."""
    _, handle = exported(exporter, SIZE, 1)
    guest = importer()
    there = opened(guest, handle)
    here = second_gpu(guest)
    assert guest.ask("copy_between", COPIES["DtoD"], here, there, SIZE) == 0
    assert guest.ask("same", here, SIZE, 1) is True
    assert guest.ask("same", there, SIZE, 1) is True, "to the host, by the GPU that did not open it"


def test_kernels_with_peer_access_reach_what_was_opened(exporter: Client, importer: StartImporter) -> None:
    """Broken: a job on several GPUs that shares memory with another faults, though it has enabled peer access."""
    _, first = exported(exporter, SIZE, 1)
    _, second = exported(exporter, SIZE, 2)
    guest = importer()
    there = opened(guest, first)
    here = second_gpu(guest)
    assert guest.ask("enable_peer", 0) == 0
    assert guest.ask("kernel_copy", here, there, SIZE) == 0
    assert guest.ask("same", here, SIZE, 1) is True
    assert guest.ask("use", 0) == 0
    later = opened(guest, second)
    assert guest.ask("use", 1) == 0
    assert guest.ask("kernel_copy", here, later, SIZE) == 0
    assert guest.ask("same", here, SIZE, 2) is True


def test_kernels_without_peer_access_do_not(exporter: Client, importer: StartImporter) -> None:
    """Broken: the two tests above would pass whatever the hook does."""
    _, handle = exported(exporter, SIZE, 1)
    guest = importer()
    there = opened(guest, handle)
    here = second_gpu(guest)
    assert guest.ask("kernel_copy", here, there, SIZE) == ILLEGAL_ADDRESS
