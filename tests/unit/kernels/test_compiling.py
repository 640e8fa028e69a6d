"""The kernels compile for a GPU, too: the interpreter is more patient than the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True,
        env={**own, "TRITON_CACHE_DIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "int8 _best_of_tile" in run.stdout and "moe _down" in run.stdout
    assert "moe_vector _second" in run.stdout and "int8_choice _best_of_tile" in run.stdout
    assert run.stdout.count("latent _attend") == 3
    assert "streamed _linear" in run.stdout and "streamed _gated" in run.stdout
    assert (
        run.stdout.count("kernels.attention _attend") == 8 and "too much: headstart" in run.stdout
    )
