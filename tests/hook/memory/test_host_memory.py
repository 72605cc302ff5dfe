"""Host memory by itself, in a time that only the test moves (programs/host_check.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hook.compiled import GATE, SOURCE, compile_c

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, under the sanitizers."""
    out = tmp_path_factory.mktemp("host") / "check"
    sources = [SOURCE / f"{name}.c" for name in ("coord/mailbox", "coord/state", "host/pool")]
    return compile_c(out, PROGRAMS / "host_check.c", *sources, *GATE, flags=("-fsanitize=address,undefined",))


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("idle", id="unused-for-ten-seconds"),
        pytest.param("used-again", id="used-again"),
        pytest.param("ahead", id="ahead-of-an-eviction"),
        pytest.param("ahead-idle", id="ahead-while-nothing-runs"),
        pytest.param("silent", id="a-coordinator-silent-for-two-seconds"),
        pytest.param("answers", id="one-that-answers"),
    ],
)
def test_host_memory(check: Path, scenario: str) -> None:
    """Broken: a program waits while memory for its eviction is pinned, before all of it was touched, for which it does
    not wait; pinned memory that nobody uses is kept from the machine for ever, or goes back between two evictions; or
    allocations wait for, or are refused by, a coordinator that does not answer."""
    done = subprocess.run([str(check), scenario], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


GIB = 1 << 30
MACHINE = "MemTotal:       104857600 kB\nMemFree:         1048576 kB\nMemAvailable:   52428800 kB\n"
"""100 GiB, of which 50 are left."""


@pytest.fixture(scope="module")
def left_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, under the sanitizers."""
    out = tmp_path_factory.mktemp("left") / "check"
    flags = ("-fsanitize=address,undefined",)
    return compile_c(out, PROGRAMS / "host_left_check.c", SOURCE / "host/system.c", flags=flags)


def group(prefix: str, bound_gib: int, used_gib: int, names: tuple[str, str] = ("max", "current")) -> dict[str, str]:
    """Files of a control group."""
    bound, used = (f"sys/fs/cgroup/{prefix}{name}" for name in names)
    return {bound: f"{bound_gib * GIB}\n", used: f"{used_gib * GIB}\n"}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        pytest.param({}, "unknown", id="no-files"),
        pytest.param({"proc/meminfo": MACHINE}, str(40 * GIB), id="no-container"),
        pytest.param({"proc/meminfo": MACHINE, "max": "max\n", "current": "7\n"}, str(40 * GIB), id="unbounded"),
        pytest.param(
            {"proc/meminfo": MACHINE, "max": f"{20 * GIB}", "current": f"{8 * GIB}"}, str(10 * GIB), id="bounded"
        ),
        pytest.param(
            {
                "proc/meminfo": MACHINE, "max": f"{20 * GIB}", "current": f"{18 * GIB}",
                "stat": f"anon {4 * GIB}\nfile {14 * GIB}\nactive_file {3 * GIB}\ninactive_file {11 * GIB}\n",
            },
            str(11 * GIB), id="full-of-files-that-were-read",
        ),
        pytest.param(
            {"proc/meminfo": MACHINE, "max": "100", "current": "50", "stat": "anon 1\ninactive_file 70\n"},
            "90", id="figures-that-contradict-each-other",
        ),
        pytest.param({"proc/meminfo": MACHINE, "max": f"{8 * GIB}", "current": f"{9 * GIB}"}, "0", id="over-its-bound"),
        pytest.param({"proc/meminfo": "MemTotal: x\n"}, "unknown", id="nonsense"),
        pytest.param(
            {"proc/meminfo": MACHINE, "proc/self/cgroup": "0::/user/job\n", **group("user/job/memory.", 20, 8)},
            str(10 * GIB), id="own-group",
        ),
        pytest.param(
            {
                "proc/meminfo": MACHINE, "proc/self/cgroup": "0::/user/job\n",
                **group("user/job/memory.", 30, 8), **group("user/memory.", 20, 13),
            },
            str(5 * GIB), id="least-of-nested-groups",
        ),
        pytest.param(
            {
                "proc/meminfo": MACHINE,
                "proc/self/cgroup": "9:cpu,memoryless:/job\n4:hugetlb,memory:/job\n0::/init.scope\n",
                **group("memory/job/memory.", 20, 8, ("limit_in_bytes", "usage_in_bytes")),
                "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n",
            },
            str(12 * GIB), id="version-1",
        ),
        pytest.param(
            {
                "proc/meminfo": MACHINE, "proc/self/cgroup": "4:memory:/docker/1f\n",
                **group("memory/memory.", 10, 4, ("limit_in_bytes", "usage_in_bytes")),
            },
            str(5 * GIB), id="the-path-of-the-machine-in-a-container",
        ),
        pytest.param(
            {"proc/meminfo": MACHINE, "proc/self/cgroup": "0::/../other\n", **group("memory.", 10, 4)},
            str(5 * GIB), id="outside-of-the-namespace",
        ),
        pytest.param(
            {"proc/meminfo": MACHINE, "proc/self/cgroup": "0::/" + 1100 * "x" + "\n::\nx\n"},
            str(40 * GIB), id="lines-of-no-use",
        ),
    ],
)  # fmt: skip
def test_what_is_left(left_check: Path, tmp_path: Path, files: dict[str, str], left: str) -> None:
    """Broken: where programs of a container read large files every allocation is refused; or a machine is filled."""
    for name, text in files.items():
        path = tmp_path / (name if "/" in name else f"sys/fs/cgroup/memory.{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([str(left_check), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, left, "")
