"""The hook's control API in the program's own process, by cffi."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from nvshare import client_hook
from tests.launch.conftest import module_runtime as runtime

__all__ = ["runtime"]  # fixture

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_without_the_hook_it_says_so() -> None:
    """Else a program would believe that its yielding does something."""
    assert client_hook.loaded() is False
    assert client_hook.active() is False
    for call in (client_hook.version, client_hook.state, client_hook.yield_lease):
        with pytest.raises(client_hook.HookNotLoadedError, match="nvshare-run"):
            call()


def test_under_the_hook_before_cuda_is_used(nvshare_run: Run) -> None:
    """Else asking would start the agent in a process that never uses CUDA, or fail there."""
    program = (
        "import json\nfrom nvshare import client_hook\n"
        "s = client_hook.state(0)\n"
        "seen = client_hook.loaded(), client_hook.active(), client_hook.version(), s.lease.name, s.lease_id\n"
        "print(json.dumps(seen))\n"
        "client_hook.yield_lease()\n"
    )
    done = nvshare_run("--", sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    loaded, active, version, lease, lease_id = json.loads(done.stdout)
    assert (loaded, active, lease, lease_id) == (True, False, "NONE", 0)
    assert version


def test_impossible_gpus_are_refused(nvshare_run: Run) -> None:
    """Else a typing mistake would read memory that is not the hook's."""
    program = (
        "from nvshare import client_hook\n"
        "for gpu in (-1, 32, 1 << 31, 1 << 40):\n"
        "    for call in (client_hook.state, client_hook.yield_lease):\n"
        "        try:\n"
        "            call(gpu)\n"
        "        except ValueError:\n"
        "            continue\n"
        "        print('no error for', call, gpu)\n"
    )
    done = nvshare_run("--", sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_holder_sees_its_lease(nvshare_run: Run) -> None:
    """Else a program could not tell whether it has the GPU."""
    program = (
        "import json\nfrom nvshare import client_hook\n"
        "from nvshare.bench.workloads.busy import Load, Program\n"
        "program = Program(Load(kernel_ns=1000, burst=4, copy_bytes=4096))\n"
        "program.iteration(7)\n"
        "program.finish()\n"
        "s = client_hook.state(0)\n"
        "seen = client_hook.active(), s.lease.name, s.lease_id, s.calls, s.allocated_bytes, program.mismatches\n"
        "print(json.dumps(seen))\n"
    )
    done = nvshare_run("--memory", "device", "--", sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    active, lease, lease_id, calls, allocated_bytes, mismatches = json.loads(done.stdout)
    assert (active, lease) == (True, "HELD")
    assert lease_id > 0
    assert calls >= 6
    assert allocated_bytes >= 4096
    assert mismatches == 0
