"""Where a benchmark ran: facts that explain a difference between two results."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headstart.checkpoint.local_paths import shown_words

_PACKAGES = ("headstart", "torch", "transformers", "triton", "aiohttp")
_FLAG = "--api-key"
_KEY = re.compile(rf"""({_FLAG}(?:=|\s+))(?:'[^']*'|[^\s'"]+)""")


def environment() -> dict[str, Any]:
    """Of the machine that runs the load generator, which is also the server's for a MODEL."""
    return {
        "command": shown_command(["headstart", *shown_words(sys.argv[1:])]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus(),
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


def gpus() -> list[str]:
    """Asked of the driver: torch need not be imported to load a server."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in found.stdout.splitlines()] if found.returncode == 0 else []


def shown_command(words: Sequence[str]) -> str:
    """A command as it may be written down: without keys, also of a server's flags inside it."""
    shown = [
        "..." if before == _FLAG else f"{_FLAG}=..." if word.startswith(f"{_FLAG}=") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return _KEY.sub(r"\1...", shlex.join(shown))
