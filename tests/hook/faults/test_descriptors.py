"""Descriptors of the hook's stay out of the application's way.

Non-goals: what is sent through them.
"""

from __future__ import annotations

import json
import sys

from nvshare.coordinator.protocol import messages
from tests.hook.faults.test_fault_sweep import sweep
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator

PROGRAM = """
import ctypes, json, os
said = os.dup2(1, 100)
os.closerange(0, 3)
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(1), ctypes.c_uint64(0), ctypes.c_size_t(0))  # gated
here, found = "/proc/self/fd/", {}
for number in os.listdir(here):
    if os.path.islink(here + number):
        found[number] = os.readlink(here + number)
os.write(said, json.dumps(found).encode())
"""


TAKES = """
import ctypes, os, socket
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
taken = []
def work():
    cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(1), ctypes.c_uint64(0), ctypes.c_size_t(0))  # gated
def take():
    ours = max(int(number) for number in os.listdir("/proc/self/fd"))
    os.closerange(3, ours + 1)
    while not taken or taken[-1].fileno() <= ours:
        taken.extend(socket.socketpair())
def look():
    for each in taken:
        each.setblocking(False)
        try:
            print("disturbed", each.fileno(), each.recv(100))
        except BlockingIOError:
            pass
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
command = "ready"
while command != "end":
    print(command, flush=True)
    command = input()
    {"work": work, "take": take, "look": look}.get(command, int)()
os._exit(0)
"""


def test_a_program_that_takes_the_numbers(coordinator: ScriptedCoordinator, hook_env: dict[str, str]) -> None:
    """Broken: a program that closes what it has not opened hangs, or finds the hook's bytes in its own sockets."""
    with ScriptedClient([sys.executable, "-S", "-c", TAKES], hook_env) as client:
        client.tell("work")
        coordinator.welcome()
        coordinator.asked()
        coordinator.grant(7)
        assert client.answer() == "work"
        assert client.do("take") == "take"
        assert coordinator.welcome().lease_id == 7, "it connects again"
        coordinator.revoke(7)
        client.tell("work")
        coordinator.expect(messages.Request)
        coordinator.grant(8)
        assert client.answer() == "work"
        assert client.do("look") == "look"
        client.tell("end")
        assert client.ended()[0] == 0


def test_a_program_without_standard_output(coordinator: ScriptedCoordinator, hook_env: dict[str, str]) -> None:
    """A daemon that was started with 0, 1 and 2 closed would print into the connection to the coordinator."""
    (line,) = sweep(coordinator, hook_env, sys.executable, "-S", "-c", PROGRAM)
    ours = {int(number) for number, name in json.loads(line).items() if name.startswith(("socket:", "anon_inode:"))}
    assert len(ours) >= 2
    assert min(ours) > 100
