"""The table of CUDA entry points against `cuda.h`, and the built hook against the table and old systems.

Invariants: a new CUDA release fails here until somebody has decided what to do with each of its functions.

Non-goals: what the hook does when it runs (tests/hook).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvshare.client_hook.find_cuda_header import candidates
from tests.conftest import ROOT, Built

TABLE = ROOT / "client_hook" / "src" / "driver" / "cuda_api.def"

EXEMPT: dict[str, str] = {}
"""Functions of cuda.h that are no row, and why."""

MUST_BE_GATED = {
    "launches": r"cuLaunch(Kernel|KernelEx|CooperativeKernel|CooperativeKernelMultiDevice|Grid|GridAsync)?(_.*)?$",
    "host functions, which delay a stream": r"cuLaunchHostFunc|cuStreamAddCallback",
    "graph launch, upload, instantiation": r"cuGraphLaunch|cuGraphUpload|cuGraphInstantiate",
    "copies": r"cuMemcpy|cuFabricCpy",
    "memsets": r"cuMemset",
    "prefetch, discard, advice": r"cuMemPrefetch|cuMemDiscard|cuMemAdvise",
    "stream memory operations": r"cuStream(WriteValue|WaitValue|BatchMemOp)",
    "decompression": r"cuMemBatchDecompress",
    "mapping that a stream does": r"cuMemMapArrayAsync|cuGraphics(Map|Unmap)Resources|cuStreamAttachMemAsync",
    "external semaphores": r"cu(Signal|Wait)ExternalSemaphores",
    "context-wide waits": r"cu(Ctx|GreenCtx)WaitEvent",
    "the beginning of a capture": r"cuStreamBegin(Recapture|Capture)",
    "graphics buffers": r"cuGLMapBufferObject|cuEGLStream(Consumer|Producer)(Acquire|Release|Present|Return)Frame",
}
"""Classes of functions that put work on a GPU; a capture begins inside the gate too."""

MUST_BE_CUSTOM = (
    r"cuMemAlloc(_v2|Pitch(_v2)?|Managed|Async(_ptsz)?|FromPoolAsync(_ptsz)?)?$|cuMemFree(_v2|Async(_ptsz)?)?$|"
    r"cuMemGetInfo|cuDeviceTotalMem|cuMemCreate$|cuMemRelease$|cuArray(3D)?Create|cuArrayDestroy|cuMipmappedArray(Create|Destroy)$|"
    r"cuIpc(Get|Open|Close)MemHandle(_v2)?$|cuGetProcAddress|cuInit$|cuCtx(Create|Destroy|SetCurrent|PushCurrent|PopCurrent)|"
    r"cuDevicePrimaryCtx(Retain|Release|Reset)|cuStream(Create|Destroy|EndCapture)|cuGreenCtxStreamCreate$"
)
"""Allocations, frees, figures, and what the registry of contexts and streams must hear of."""

STREAM_BUT_NO_WORK = (
    r"cuStream(Query|Synchronize|Get|Is|Copy|SetAttribute|Destroy|Update|EndCapture|WaitEvent)|cuEventRecord|"
    r"cuMem(Alloc|Free).*Async|cuMemAllocFromPoolAsync|cuGraphicsResource"
)
"""Functions with a stream among their parameters that put nothing on it, or are memory wrappers."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    kind: str
    name: str
    since: int
    reason: str
    guard: int


def read_rows() -> list[Row]:
    """All rows, in the order of the file."""
    text = re.sub(r"/\*.*?\*/", "", TABLE.read_text(encoding="utf-8"), flags=re.DOTALL)
    number, variant = r"(\d+)", r"(?:_(PTSZ|PTDS))?"
    row = rf'^NVS_([A-Z]+){variant}\((\w+),\s*{number}(?:,\s*{number})?(?:,\s*"([^"]*)")?'
    pattern = rf"^#if CUDA_VERSION >= {number}|^(#endif)|{row}"
    rows: list[Row] = []
    guard = 0
    for version, end, kind, suffix, name, since, later, reason in re.findall(pattern, text, flags=re.MULTILINE):
        if kind:
            rows.append(Row(kind, name, int(since), reason, guard))
            if suffix:
                rows.append(Row(kind, f"{name}_{suffix.lower()}", int(later), reason, guard))
        else:
            guard = 0 if end else int(version)
    return rows


OLD_INTERFACE = "32-bit interface"
"""Beginning of the reason of a function that a `_v2` replaced in CUDA 3.2; it is never wrapped."""

ROWS = read_rows()
CURRENT = [row for row in ROWS if not row.reason.startswith(OLD_INTERFACE)]
BY_NAME = {row.name: row for row in ROWS}


def cuda_include() -> Path:
    """Directory of the header that the build uses."""
    found = [directory for directory in candidates() if (directory / "cuda.h").is_file()]
    if not found:
        pytest.fail("cuda.h not found: pip install nvidia-cuda-runtime")
    return found[0]


@functools.cache
def declarations() -> dict[str, str]:
    """Name and parameters of every function that cuda.h declares, under the names that a driver exports."""
    compiler = os.environ.get("CC", "cc")
    command = (compiler, "-E", "-P", "-x", "c", "-D__CUDA_API_VERSION_INTERNAL", str(cuda_include() / "cuda.h"))
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"CUresult\s+(cu[A-Z]\w*)\s*\(([^;]*)\)\s*;", text))


def test_every_function_of_the_header_is_decided() -> None:
    """A function that nobody has looked at slips past the gate."""
    declared = declarations()
    assert len(declared) > 630
    assert sorted(set(declared) - set(BY_NAME) - set(EXEMPT)) == []
    assert all(len(reason.split()) > 2 for reason in EXEMPT.values())


def test_rows_can_be_bisected() -> None:
    """A row out of order, or twice, is not found by name."""
    names = [row.name for row in ROWS]
    assert names == sorted(names)
    assert len(names) == len(set(names))


def test_what_is_not_wrapped_has_a_reason() -> None:
    """A function is let through by decision, never by neglect."""
    assert [row.name for row in ROWS if row.kind in ("PASS", "THUNK", "FOREIGN") and row.reason.strip() == ""] == []


def test_newer_functions_are_conditional() -> None:
    """The hook must compile with every cuda.h of CUDA 13, the oldest included."""
    assert [row.name for row in ROWS if row.guard != (row.since if row.since > 13000 else 0)] == []


@pytest.mark.parametrize("what", MUST_BE_GATED)
def test_what_puts_work_on_a_gpu_is_gated(what: str) -> None:
    """Work of this class would reach the GPU without a lease."""
    rows = [row for row in CURRENT if re.match(MUST_BE_GATED[what], row.name)]
    assert rows
    assert [row.name for row in rows if row.kind not in ("STREAM", "CURRENT", "UNSTREAMED", "CUSTOM", "THUNK")] == []


def test_memory_contexts_and_streams_are_wrapped_by_hand() -> None:
    """An allocation that is not seen is not charged; a stream that is not seen is not drained."""
    rows = [row for row in CURRENT if re.match(MUST_BE_CUSTOM, row.name)]
    assert len(rows) > 50
    assert [row.name for row in rows if row.kind != "CUSTOM"] == []


def test_only_the_32_bit_interface_is_let_through_for_its_age() -> None:
    """A function that programs of today use is let through as an old one."""
    old = [row for row in ROWS if row.reason.startswith(OLD_INTERFACE)]
    assert len(old) == 31
    assert [row.name for row in old if row.since > 3000 or BY_NAME[f"{row.name}_v2"].since != 3020] == []
    parameters = declarations()
    assert [row.name for row in old if not re.search(r"unsigned int|_v1\b", parameters[row.name])] == []


def test_what_takes_a_stream_is_gated() -> None:
    """A new function that submits to a stream was let through because its name is of no known class."""
    missed = [
        name
        for name, parameters in declarations().items()
        if re.search(r"\bCUstream\s+\w+", parameters)
        and BY_NAME[name].kind == "PASS"
        and not BY_NAME[name].reason.startswith(OLD_INTERFACE)
        and not re.match(STREAM_BUT_NO_WORK, name)
    ]
    assert missed == []


def test_versions_are_those_of_the_driver() -> None:
    """Where the address does not say which function cuGetProcAddress gave, the version must."""
    header = (cuda_include() / "cudaTypedefs.h").read_text(encoding="utf-8")
    known: dict[tuple[str, str], set[int]] = {}
    for name, version, variant in re.findall(r"\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)", header):
        known.setdefault((name, variant), set()).add(int(version))
    assert len(known) > 400
    wrong = []
    for row in ROWS:
        match = re.fullmatch(r"(cu\w+?)(?:_v\d+)?(_ptsz|_ptds)?", row.name)
        assert match is not None
        versions = known.get((match[1], match[2] or ""))
        if versions is not None and row.since not in versions and row.guard == 0:  # new ones come late into this header
            wrong.append((row.name, row.since, sorted(versions)))
    assert wrong == []


def tool(*command: str) -> str:
    """Output of a tool of the C toolchain."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_library_exports_the_table_and_nothing_else(built: Built) -> None:
    """A symbol too few is a bypass by the PLT; a symbol too many may shadow one of the application's."""
    output = tool("nm", "-D", "--defined-only", str(built.hook))
    exported = {line.split()[-1] for line in output.splitlines()}
    version = int(re.findall(r"#define CUDA_VERSION (\d+)", (cuda_include() / "cuda.h").read_text(encoding="utf-8"))[0])
    expected = {
        row.name for row in ROWS if row.kind in ("STREAM", "CURRENT", "UNSTREAMED", "CUSTOM") and row.guard <= version
    }
    table = (ROOT / "client_hook" / "src" / "driver" / "nvml_api.def").read_text(encoding="utf-8")
    expected |= set(re.findall(r"^NVS_NVML\((\w+)", table, re.MULTILINE))
    lists = re.findall(r"^NVS_NVML_LISTS\((\w+)", table, re.MULTILINE)
    expected |= {name + version for name in lists for version in ("", "_v2", "_v3")}
    assert expected - exported == set()
    ours = {name for name in exported - expected if not name.startswith("nvshare_")}
    assert ours == {"dlopen", "dlsym", "dlvsym"}


def test_the_library_loads_on_old_systems(built: Built) -> None:
    """A preload that asks for a newer glibc than the image has kills every process in it."""
    symbols = tool("objdump", "-T", str(built.hook))
    needed = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols)}
    assert needed
    assert max(needed) <= (2, 17)


def test_the_library_needs_libc_only(built: Built) -> None:
    """Whatever else it needed would be loaded into every process, and be missing in some image."""
    libraries = set(re.findall(r"NEEDED\s+(\S+)", tool("objdump", "-p", str(built.hook))))
    assert libraries <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
