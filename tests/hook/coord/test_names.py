"""The name that a program of an interpreter has for tools: what it runs, not `python` or `node`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.scripted import ScriptedCoordinator

CUDA = "import ctypes, sys; ctypes.CDLL('libcuda.so.1').cuInit(0); sys.stdin.read()"
CHILD = CUDA.replace("sys.stdin.read()", "__import__('threading').Event().wait()")  # it has no standard input
SPAWN = f"""
import multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    child = multiprocessing.Process(target=exec, args=({CHILD!r},))
    child.start()
    sys.stdin.read()
    child.kill()
"""
KERNEL = ("-m", "ipykernel_launcher", "-f", "/run/kernel-1a2b3c4d-5e6f-7081.json")


@pytest.mark.parametrize(
    ("words", "session", "name"),
    [
        (("{dir}/train.py", "--rate", "3"), None, "train.py"),
        (("-u", "-W", "ignore", "-Xdev", "--check-hash-based-pycs", "never", "{dir}/train.py"), None, "train.py"),
        (("-m", "package.job", "-c"), None, "package.job"),
        (("-um", "package.job"), None, "package.job"),
        (("-c", CUDA), None, "python -c"),
        (KERNEL, "/data/study.ipynb", "study.ipynb"),
        (KERNEL, None, "kernel-1a2b3c4d"),
        (("{dir}/train.py",), "/data/study.ipynb", "train.py"),
        (("{dir}/spawn.py",), None, "spawn.py"),
    ],
)
def test_a_python_program_is_its_script(
    coordinator: ScriptedCoordinator,
    hook_env: dict[str, str],
    tmp_path: Path,
    words: tuple[str, ...],
    session: str | None,
    name: str,
) -> None:
    """Broken if all programs of a server were called `python`."""
    (tmp_path / "package").mkdir()
    for path in ("train.py", "package/job.py", "ipykernel_launcher.py"):
        (tmp_path / path).write_text(CUDA)
    (tmp_path / "spawn.py").write_text(SPAWN)
    environment = {**hook_env, "NVSHARE_NAME": "", "PYTHONPATH": str(tmp_path)}
    if session is not None:
        environment["JPY_SESSION_NAME"] = session
    command = [sys.executable, *(word.format(dir=tmp_path) if "{dir}" in word else word for word in words)]
    program = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    try:
        assert coordinator.expect(messages.Hello).name == name
    finally:
        program.communicate()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("node --require ./trace.js -r dotenv --max-old-space-size=8192 /srv/server.mjs --port 80", "server.mjs"),
        ("/usr/bin/nodejs inspect server.js", "server.js"),
        ("node -e work()", "node -e"),
        ("deno run --allow-net --config deno.json chat.ts", "chat.ts"),
        ("bun run --preload a.ts chat.ts", "chat.ts"),
        ("ruby3.1 -w -Ilib -r json train.rb", "train.rb"),
        ("perl5.36 -w -MData::Dumper -I lib train.pl", "train.pl"),
        ("perl -we work", "perl -e"),
        ("php8.2 -d memory_limit=-1 -f /srv/job.php", "job.php"),
        ("/usr/lib/R/bin/exec/R --no-echo --no-restore --file=/srv/fit.R --args 3", "fit.R"),
        ("julia --project=. -O3 -t 4 --threads 4 fit.jl", "fit.jl"),
        ("java -Xmx4g -cp a.jar:b.jar -Djob=1 -jar /opt/app.jar", "app.jar"),
        ("java -classpath a.jar com.acme.Train 3", "com.acme.Train"),
        ("bash -x -o pipefail /srv/job.sh", "job.sh"),
        ("sh -c work", "sh -c"),
        ("node", "client"),
        ("node -", "client"),
        ("nodemon server.js", "client"),
        ("javac -d out Train.java", "client"),
    ],
)
def test_a_program_of_another_interpreter_is_its_script(
    coordinator: ScriptedCoordinator, hook_env: dict[str, str], client_program: Path, words: str, name: str
) -> None:
    """Broken: all servers of an interpreter are called `node`, or a program by an option's value."""
    program = subprocess.Popen(
        words.split(), executable=client_program, env={**hook_env, "NVSHARE_NAME": ""}, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert program.stdin is not None
    program.stdin.write(b"state\n")  # its first command begins with cuInit
    program.stdin.flush()
    try:
        expected = words.split()[0] if name == "client" else name
        assert coordinator.expect(messages.Hello).name == expected
    finally:
        program.communicate()
