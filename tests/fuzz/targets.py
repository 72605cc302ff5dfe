"""The fuzzed parts of the hook, compiled with a fuzzer or with a main that replays files.

The corpus of a target is one file: each input after its length in two bytes, big endian.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.hook.compiled import INCLUDES, cuda_include
from tests.unit.protocol import codec

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
TARGETS = ("decoder", "transport", "resolver")


def read_corpus(target: str) -> list[bytes]:
    """The inputs that each reach something of their own."""
    packed, inputs = (CORPUS / target).read_bytes(), []
    while packed:
        end = 2 + int.from_bytes(packed[:2], "big")
        inputs.append(packed[2:end])
        packed = packed[end:]
    return inputs


def write_corpus(target: str, inputs: Iterable[bytes]) -> None:
    """Replaces the corpus."""
    (CORPUS / target).write_bytes(b"".join(len(one).to_bytes(2, "big") + one for one in sorted(inputs)))


def unpack(target: str, directory: Path) -> list[Path]:
    """The corpus as files, which a fuzzer reads."""
    directory.mkdir()
    files = []
    for number, content in enumerate(read_corpus(target)):
        files.append(directory / str(number))
        files[-1].write_bytes(content)
    return files


def _compile(compiler: str, target: str, out: Path, *flags: str, more: tuple[Path, ...] = ()) -> str:
    """Empty when it worked, else the compiler's words."""
    sources = [HERE / f"fuzz_{target}.c", *more]
    if target == "decoder":
        shim = out.with_suffix(".shim.c")
        shim.write_text(codec.shim())
        sources.append(shim)
    include = ["-I", str(HERE), *INCLUDES, "-isystem", cuda_include()]
    command = [compiler, "-std=gnu11", "-O1", "-g", *flags, *include, *map(str, sources), "-o", str(out), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr[-4000:] if done.returncode != 0 else ""


def build_replay(target: str, directory: Path) -> Path:
    """A program that runs the files it is given, under ASan and UBSan.  AssertionError when it does not compile."""
    out = directory / f"{target}-replay"
    sanitizers = "-fsanitize=address,undefined"
    words = _compile("gcc", target, out, sanitizers, "-fno-sanitize-recover=all", more=(HERE / "replay.c",))
    assert not words, words
    return out


def build_fuzzer(target: str, directory: Path) -> Path | None:
    """A libFuzzer program under ASan and UBSan; None where no compiler has libFuzzer."""
    clang = shutil.which("clang")
    probe = directory / "probe.c"
    probe.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d == 0 && n == 1; }\n")
    sanitizers = "-fsanitize=fuzzer,address,undefined"
    if clang is None:
        return None
    command = [clang, sanitizers, str(probe), "-o", str(directory / "probe")]
    probed = subprocess.run(command, capture_output=True, check=False)
    if probed.returncode != 0:
        return None
    out = directory / f"{target}-fuzzer"
    words = _compile(clang, target, out, sanitizers, "-fno-sanitize-recover=all")
    assert not words, words
    return out
