"""A script that compiles kernels, in a process of its own: tests interpret them in theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_compiled(script: Path, cache: Path, *words: str) -> str:
    """What it prints; it must end well."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *words], capture_output=True, text=True,
        env={**own, "TRITON_CACHE_DIR": str(cache)}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
