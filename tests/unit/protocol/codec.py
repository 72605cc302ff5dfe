"""The generated C codec, compiled into a small library, and ways to make frames.

Non-goals: tests.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from dataclasses import fields
from pathlib import Path

import msgpack

from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.codegen import snake
from nvshare.coordinator.protocol.fields import Field, limits

SOURCE = Path(__file__).resolve().parents[3] / "client_hook" / "src"

TABLES = {"to_coordinator": messages.TO_COORDINATOR, "to_client": messages.TO_CLIENT}

OK, UNKNOWN, MALFORMED = 0, 1, 2


def shim() -> str:
    """C: decode a frame and encode the outcome again."""
    lines = ['#include "coord/protocol/wire.gen.h"', "#include <stdio.h>", "#include <stdlib.h>"]
    for direction, table in TABLES.items():
        lines += [
            f"int test_{direction}(const uint8_t *f, size_t n, uint8_t *out, size_t capacity, size_t *size) {{",
            f"  nvs_{direction} in; *size = 0;",
            f"  nvs_wire_result r = nvs_decode_{direction}(f, n, &in);",
            "  if (r == NVS_WIRE_UNKNOWN) { out[0] = in.type; *size = 1; }",
            "  if (r != NVS_WIRE_OK) return (int)r;",
            "  switch (in.type) {",
        ]
        for cls in table.values():
            name = snake(cls.__name__)
            lines.append(f"  case {cls.TYPE}: *size = nvs_encode_{name}(&in.{name}, out, capacity); break;")
        lines += ["  }", "  return 0; }"]
    return "\n".join(lines)


def compile_library(directory: Path) -> ctypes.CDLL:
    """The shim as a library."""
    source, out = directory / "codec.c", directory / "codec.so"
    source.write_text(shim())
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC")
    subprocess.run(["gcc", *flags, "-I", str(SOURCE), str(source), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def c_decode(library: ctypes.CDLL, direction: str, frame: bytes) -> tuple[int, bytes]:
    """Verdict, and the message encoded again (OK) or its type (UNKNOWN)."""
    out = ctypes.create_string_buffer(messages.MAX_FRAME_BYTES)
    size = ctypes.c_size_t()
    function = getattr(library, f"test_{direction}")
    verdict = function(frame, ctypes.c_size_t(len(frame)), out, ctypes.c_size_t(len(out)), ctypes.byref(size))
    return verdict, out.raw[: size.value]


def python_decode(direction: str, frame: bytes) -> tuple[int, bytes]:
    """The same by coordinator/protocol/messages.py."""
    try:
        message = messages.decode(frame, TABLES[direction])
    except messages.RemoteProtocolError:
        return MALFORMED, b""
    if isinstance(message, int):
        return UNKNOWN, bytes([message])
    return OK, messages.encode(message)


def random_value(rng: random.Random, bound: Field) -> object:
    """Some value that the bound allows, often one at its edge."""
    if bound.kind == "bool":
        return rng.random() < 0.5
    if bound.kind == "text":
        letters = rng.choice(["a", "é", "漢", "\U0001f600"])
        return letters * rng.randint(0, bound.size // len(letters.encode()))
    _, low, high = limits(bound)
    return rng.choice([low, high, rng.randint(low, high), rng.randint(max(low, 0), min(high, 300))])


def random_message(rng: random.Random) -> messages.Message:
    """Any message of either direction."""
    cls = rng.choice([*messages.TO_COORDINATOR.values(), *messages.TO_CLIENT.values()])
    return cls(*(random_value(rng, bound) for bound in cls.LAYOUT))


def loose_integer(rng: random.Random, value: int) -> bytes:
    """One of the encodings that msgpack has for an integer, rarely the shortest."""
    forms = []
    for code, size, signed in ((0xCC, 1, False), (0xCD, 2, False), (0xCE, 4, False), (0xCF, 8, False)):
        if 0 <= value < 1 << 8 * size:
            forms.append(bytes([code]) + value.to_bytes(size, "big", signed=signed))
    for code, size in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        if -(1 << 8 * size - 1) <= value < 1 << 8 * size - 1:
            forms.append(bytes([code]) + value.to_bytes(size, "big", signed=True))
    return rng.choice(forms)


def loose_text(rng: random.Random, text: str) -> bytes:
    """str8, 16, 32 or bin8, 16, 32."""
    raw = text.encode()
    forms = [(0xD9, 1), (0xDA, 2), (0xDB, 4), (0xC4, 1), (0xC5, 2), (0xC6, 4)]
    code, size = rng.choice([form for form in forms if len(raw) < 1 << 8 * form[1]])
    return bytes([code]) + len(raw).to_bytes(size, "big") + raw


def loose_frame(rng: random.Random, message: messages.Message) -> bytes:
    """Another encoding of the same message, with extra fields of any type."""
    values = [message.TYPE, *(getattr(message, f.name) for f in fields(message))]  # type: ignore[arg-type]
    parts = []
    for value in values:
        if isinstance(value, bool):
            parts.append(msgpack.packb(value))
        elif isinstance(value, int):
            parts.append(loose_integer(rng, value))
        else:
            parts.append(loose_text(rng, value))
    parts += [msgpack.packb(random_extra(rng, 3)) for _ in range(rng.randint(0, 3))]
    count = len(parts)
    head = rng.choice([b"\xdc" + count.to_bytes(2, "big"), b"\xdd" + count.to_bytes(4, "big")])
    return head + b"".join(parts)


def random_extra(rng: random.Random, depth: int) -> object:
    """Some msgpack value of any type."""
    kind = rng.randint(0, 8 if depth else 6)
    if kind == 0:
        return rng.randbytes(rng.randint(0, 20))
    if kind == 1:
        return rng.choice([None, True, False])
    if kind == 2:
        return rng.uniform(-1e9, 1e9)
    if kind == 3:
        return rng.randint(-(1 << 63), (1 << 64) - 1)
    if kind == 4:
        return "é" * rng.randint(0, 40)
    if kind == 5:
        return msgpack.ExtType(rng.randint(0, 127), rng.randbytes(rng.choice([1, 2, 3, 4, 8, 16, 20])))
    if kind == 6:
        return msgpack.Timestamp(rng.randint(-(1 << 40), 1 << 40), rng.randint(0, 10**9 - 1))
    if kind == 7:
        return [random_extra(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {rng.randint(0, 99): random_extra(rng, depth - 1) for _ in range(rng.randint(0, 3))}


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """A frame with a few bytes changed, removed, doubled, or cut."""
    out = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        if not out:
            break
        at = rng.randrange(len(out))
        action = rng.randint(0, 4)
        if action == 0:
            out[at] = rng.randrange(256)
        elif action == 1:
            out[at] = rng.choice([0x80, 0x90, 0xC1, 0xC7, 0xD4, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF, 0xC0])
        elif action == 2:
            del out[at : at + rng.randint(1, 4)]
        elif action == 3:
            out[at:at] = rng.randbytes(rng.randint(1, 4))
        else:
            del out[at:]
    return bytes(out)


def random_frame(rng: random.Random) -> bytes:
    """Valid, loose, mutated or plain nonsense."""
    choice = rng.randint(0, 4)
    if choice == 0:
        return messages.encode(random_message(rng))
    if choice == 1:
        return loose_frame(rng, random_message(rng))
    if choice == 2:
        return mutated(rng, messages.encode(random_message(rng)))
    if choice == 3:
        return mutated(rng, loose_frame(rng, random_message(rng)))
    body = bytes([rng.choice([0x91, 0x92, 0x93, 0xDC, 0xDD]), rng.choice([1, 2, 8, 64, 72, 200])])
    return body + rng.randbytes(rng.randint(0, 40))
