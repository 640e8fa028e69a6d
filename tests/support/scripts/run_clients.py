"""Run programs of scripts/clients one after another in one process, which imports once what they
share: `python run_clients.py URL NAME...` prints one JSON object for each name."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[3] / "scripts" / "clients" / "programs"


def main() -> None:
    _, url, *names = sys.argv
    sys.path.insert(0, str(PROGRAMS))
    for name in names:
        sys.argv = [name, url]
        runpy.run_path(str(PROGRAMS / f"try_{name}.py"))


if __name__ == "__main__":
    main()
