"""Figures of a benchmark on a CPU as they come in: JSON, and beside it a page with its tables.

Both are written again after every part, so that a run that is cut off has shown something.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headstart.bench.environment import processor_name


def save(out: Path, title: str, document: dict[str, Any], tables: Sequence[str]) -> None:
    """`tables` are Markdown lines; where and when it ran, and how, stands above them."""
    name = processor_name()
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    known: dict[str, Any] = {
        "processor": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": platform.python_version(), "load_average": load,
    }  # fmt: skip
    out.write_text(json.dumps({**document, **known}) + "\n")
    command = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *map(_short, sys.argv[1:])])
    lines = [
        f"# {title}",
        "",
        f"{name}, {known['threads']} threads, torch {known['torch']}, Python {known['python']}, "
        f"{time.strftime('%Y-%m-%d')}; load average {load}.",
        "",
        f"    python {command}",
        "",
        *tables,
    ]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _short(argument: str) -> str:
    """Files by their names alone: where they lay says nothing to others."""
    return Path(argument).name if "/" in argument else argument


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
