"""Where a benchmark ran: facts that explain a difference between two results."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("headstart", "torch", "transformers", "triton", "aiohttp")


def environment() -> dict[str, Any]:
    """Of the machine that runs the load generator, which is also the server's for a MODEL."""
    return {
        "command": shlex.join(["headstart", *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor_name() -> str:
    """As the system tells it; the architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    """Asked of the driver: torch need not be imported to load a server."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in found.stdout.splitlines()] if found.returncode == 0 else []
