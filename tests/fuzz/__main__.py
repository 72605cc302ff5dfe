"""Fuzzes one part of the hook for a while: `python -m tests.fuzz decoder|transport|resolver --seconds N`.

Needs clang with libFuzzer.  Inputs that reach something new, and an input that crashes, become part of the corpus,
which the tests replay with any compiler.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.targets import TARGETS, build_fuzzer, unpack, write_corpus


def main() -> int:
    """Command line; the exit code is the fuzzer's."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz one part of the hook")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="default 60")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        program = build_fuzzer(options.target, scratch)
        if program is None:
            sys.stderr.write("tests.fuzz: no clang with libFuzzer here; install clang and its runtime\n")
            return 1
        corpus, found, merged, crashes = (scratch / part for part in ("corpus", "found", "merged", "crashes"))
        unpack(options.target, corpus)
        for made in (found, merged, crashes):
            made.mkdir()
        words = [f"-max_total_time={options.seconds}", "-max_len=8192", f"-artifact_prefix={crashes}/"]
        code = subprocess.run([str(program), *words, str(found), str(corpus)], check=False).returncode
        subprocess.run([str(program), "-merge=1", str(merged), str(corpus), str(found)], check=False)
        write_corpus(options.target, [file.read_bytes() for kept in (merged, crashes) for file in kept.iterdir()])
    return code


if __name__ == "__main__":
    sys.exit(main())
