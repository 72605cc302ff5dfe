"""Assumptions of the bypass detector about CUPTI: the layout that it declares, held against CUPTI's headers.

How it behaves is tested on a card, in tests/gpu/test_detector_card.py.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.gpu.detector.reports import HERE as DETECTOR
from tests.hook.compiled import cuda_include

_ABSENT = """
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __forceinline__
#define __builtin_align__(x)
#define __align__(x)
#define __CUDA_DEPRECATED
#define CUDARTAPI
"""
"""Definitions of crt/host_defines.h that CUPTI's headers use; no wheel that is needed here has the file."""

_CHECK = """
#include <cupti.h>
#include "cupti_abi.h"
#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #ours " is not " #theirs)
#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityKernel10 kernel;
typedef CUpti_ActivityMemcpy6 copy;
#else
typedef CUpti_ActivityKernel9 kernel;
typedef CUpti_ActivityMemcpy5 copy;
#endif
SAME(NVS_CUPTI_KERNEL_CORRELATION, offsetof(kernel, correlationId));
SAME(NVS_CUPTI_KERNEL_NAME, offsetof(kernel, name));
SAME(NVS_CUPTI_MEMCPY_CORRELATION, offsetof(copy, correlationId));
SAME(NVS_CUPTI_MEMCPY_PEER_CORRELATION, offsetof(CUpti_ActivityMemcpyPtoP4, correlationId));
SAME(NVS_CUPTI_MEMSET_CORRELATION, offsetof(CUpti_ActivityMemset4, correlationId));
SAME(offsetof(nvs_cupti_call, site), offsetof(CUpti_CallbackData, callbackSite));
SAME(offsetof(nvs_cupti_call, function), offsetof(CUpti_CallbackData, functionName));
SAME(offsetof(nvs_cupti_call, symbol), offsetof(CUpti_CallbackData, symbolName));
SAME(offsetof(nvs_cupti_call, correlation), offsetof(CUpti_CallbackData, correlationId));
SAME(NVS_CUPTI_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
SAME(NVS_CUPTI_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY);
SAME(NVS_CUPTI_MEMCPY_PEER, CUPTI_ACTIVITY_KIND_MEMCPY2);
SAME(NVS_CUPTI_MEMSET, CUPTI_ACTIVITY_KIND_MEMSET);
SAME(NVS_CUPTI_DRIVER, CUPTI_CB_DOMAIN_DRIVER_API);
SAME(NVS_CUPTI_RUNTIME, CUPTI_CB_DOMAIN_RUNTIME_API);
SAME(NVS_CUPTI_ENTER, CUPTI_API_ENTER);
SAME(NVS_CUPTI_EXIT, CUPTI_API_EXIT);
SAME(NVS_CUPTI_MAX_LIMIT_REACHED, CUPTI_ERROR_MAX_LIMIT_REACHED);
SAME(NVS_CUPTI_MULTIPLE_SUBSCRIBERS, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
SAME(NVS_CUPTI_FLUSH_FORCED, CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
_Static_assert(NVS_CUPTI_KNOWS(CUPTI_API_VERSION), "this CUPTI is newer than the declarations");
"""


def cupti_headers() -> list[Path]:
    """Header folders of every installed CUPTI wheel."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [place / part / "include" for place in places for part in ("cu13", "cuda_cupti")]
    return [path for path in found if (path / "cupti.h").is_file()]


def test_the_declarations_are_those_of_cupti(tmp_path: Path) -> None:
    """Read at a wrong place, a correlation accuses the innocent or clears the guilty."""
    headers = cupti_headers()
    if not headers:
        pytest.skip("CUPTI's headers are not installed: pip install nvidia-cuda-cupti")
    (tmp_path / "crt").mkdir()
    (tmp_path / "crt" / "host_defines.h").write_text(_ABSENT)
    (tmp_path / "check.c").write_text(_CHECK)
    for include in headers:
        flags = ["-fsyntax-only", "-w", "-I", str(DETECTOR), "-isystem", str(include), "-isystem", cuda_include()]
        command = ["gcc", *flags, "-idirafter", str(tmp_path), str(tmp_path / "check.c")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
