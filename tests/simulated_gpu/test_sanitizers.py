"""The simulated driver under ASan, UBSan and TSan: tests on a driver with races would prove nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.test_sanitized import sanitized
from tests.hook.compiled import compile_c

STRESS = Path(__file__).parent / "programs" / "stress.c"


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    """Threads that use everything at once find no race, no overrun, no leak of what was released, no wrong byte."""
    variables = sanitized(sanitizer)
    directory = variables["NVSHARE_SIM_LIBRARY_DIR"]
    program = compile_c(
        tmp_path / "stress", STRESS, Path(directory) / "libcuda.so.1", flags=(f"-fsanitize={sanitizer}",)
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NVSHARE_")},
        **{name: value for name, value in variables.items() if name.endswith("_OPTIONS")},
        "NVSHARE_SIM_COPY_GIBPS": "0",
        "NVSHARE_SIM_STATE": str(tmp_path / "simulated_gpu"),
        "NVSHARE_SIMULATE": "2x256MiB",
        "LD_LIBRARY_PATH": directory,
    }
    # TSan of GCC 12 cannot live with the large address randomisation of newer kernels.
    command = ["setarch", "-R", str(program)] if sanitizer == "thread" else [str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    assert done.stdout == "ok\n"
