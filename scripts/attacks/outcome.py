"""What an attack came to, and what attacks share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
_LINE_LIMIT = 3000


@dataclass
class Outcome:
    """Counts of an attack by how its trials ended, and every trial that broke a promise."""

    name: str
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_trials(self) -> int:
        return sum(self.ends.values())

    def document(self) -> dict[str, Any]:
        return {
            "attack": self.name, "trials": self.num_trials, "ends": dict(self.ends),
            "broken": self.broken, **self.facts,
        }  # fmt: skip


def support(name: str) -> Any:
    """A module of tests/support, which makes the checkpoints that are attacked."""
    import_module("support.environment")
    return import_module(f"support.{name}")


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "headstart", *words]


def run(*words: str, cwd: Path, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(), capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def complaint(code: int, said: str) -> str | None:
    """What is wrong with how a command ended; None for success or one line of refusal."""
    if "Traceback" in said:
        return "a traceback: " + said.strip().splitlines()[-1][:200]
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if code not in (0, 1, 2) or (code and len(errors) != 1) or len(said) > _LINE_LIMIT:
        return f"ended with {code} and {said[-200:]!r}"
    return None


def digests(folder: Path) -> dict[str, str]:
    """Every file of a tree, by what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
