"""Functions of a whole driver by name, version and flag: the same without the hook and with it.

Runs on the simulated driver everywhere and on the real one where there is a card: no answer may differ but in that it
leads through the hook.

Non-goals: calls of what was handed out (test_interception.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.conftest import Built
from tests.test_cuda_api import ROWS

PROGRAM = r"""
import ctypes, json, sys

names = json.loads(sys.argv[1])
cuda = ctypes.CDLL("libcuda.so.1")
resolve = cuda.cuGetProcAddress_v2
resolve.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]

def address(name):
    try:
        return ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value
    except AttributeError:
        return 0

def ask(name, version, flags):
    out, status = ctypes.c_void_p(), ctypes.c_int(9)
    result = resolve(name.encode(), ctypes.byref(out), version, flags, ctypes.byref(status))
    return result, status.value, out.value or 0

hook = [0, 0]
for line in open("/proc/self/maps"):
    if "libnvshare_hook" in line:
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        hook = [hook[0] or low, high]
symbols = {name: address(name) for name in names}
by_address = {}
for name, at in symbols.items():
    by_address.setdefault(at, []).append(name)
answers = {}
for name in names:
    for version in (2000, 3020, 7000, 10010, 11030, 12000, 12030, 13000):
        for flags in (0, 1, 2):
            result, status, at = ask(name, version, flags)
            key = f"{name} {version} {flags}"
            answers[key] = [result, status, by_address.get(at, ["?"]) if at else [], hook[0] <= at < hook[1]]
print(json.dumps({"hooked": {name: hook[0] <= at < hook[1] for name, at in symbols.items() if at}, "answers": answers}))
"""

WRAPPED = {row.name for row in ROWS if row.kind in ("STREAM", "CURRENT", "UNSTREAMED", "CUSTOM")}
THUNKS = {row.name for row in ROWS if row.kind == "THUNK"}


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of cuGetProcAddress."""

    result: int
    status: int
    functions: list[str]
    """names that dlsym gives the same address for; "?" for an address that is not exported"""
    inside: bool
    """the address is in the hook"""


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver as a process sees it."""

    exported: dict[str, bool]
    """by name: dlsym's answer is in the hook"""
    answers: dict[str, Answer]


def ask_driver(environment: dict[str, str]) -> Driver:
    """All answers of the driver that this environment leads to."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([row.name for row in ROWS])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    return Driver(said["hooked"], {question: Answer(*answer) for question, answer in said["answers"].items()})


def differences(bare: Driver, hooked: Driver) -> list[str]:
    """Answers that the hook changes, and wrapped functions that it does not stand in front of."""
    wrong = [f"{name}: exported on one side only" for name in set(bare.exported) ^ set(hooked.exported)]
    for name, inside in hooked.exported.items():
        if inside != (name in WRAPPED or name in THUNKS):
            wrong.append(f"{name}: dlsym gives {'a wrapper' if inside else 'the raw function'}")
    for question, before in bare.answers.items():
        after = hooked.answers[question]
        if (before.result, before.status) != (after.result, after.status):
            wrong.append(f"{question}: {before.result}/{before.status} became {after.result}/{after.status}")
        if "?" in before.functions:  # an address that the driver does not export: the name must decide
            family = re.compile(re.escape(question.split()[0]) + r"(_v\d+)?(_ptsz|_ptds)?$")
            if any(family.match(name) for name in WRAPPED) and not after.inside:
                wrong.append(f"{question}: handed out raw")
        elif bool(before.functions) != bool(after.functions) or not set(after.functions) <= set(before.functions):
            wrong.append(f"{question}: {before.functions} became {after.functions}")
        elif after.inside != bool(set(after.functions) & (WRAPPED | THUNKS)):
            wrong.append(f"{question}: {after.functions} {'wrapped' if after.inside else 'raw'}")
    return wrong


def test_the_simulated_driver_answers_as_without_the_hook(built: Built, sim_env: dict[str, str]) -> None:
    """An application would get another function than it asked for, or one that skips the gate."""
    bare, hooked = ask_driver(sim_env), ask_driver({**sim_env, "LD_PRELOAD": str(built.hook)})
    assert len(bare.exported) > 600
    assert differences(bare, hooked) == []


@pytest.mark.gpu
def test_the_real_driver_answers_as_without_the_hook(built: Built) -> None:
    """As above, with the driver that matters: its aliases and its unexported functions are not those of the double."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_") and k != "LD_PRELOAD"}
    bare, hooked = ask_driver(environment), ask_driver({**environment, "LD_PRELOAD": str(built.hook)})
    assert len(bare.exported) > 400
    assert differences(bare, hooked) == []
