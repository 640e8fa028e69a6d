"""Write requirements.lock: every package of the tested set by version and hash, torch aside.

    .venv/bin/python scripts/lock_requirements.py

Run it with the environment in which `make test` has passed; its versions are taken. pip finds the
files again and says their hashes. They are those of this platform (see the first lines of the
result), which `make` compares before it uses the file. torch comes from another place on many
machines (a build for CPUs, or for a driver), so that no hash of it is portable.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXTRAS = "bench,dev,serve,train"
NOT_LOCKED = ("headstart", "torch")


def tag() -> str:
    """The platform whose files are locked, as `make` compares it."""
    major, minor, _ = platform.python_version_tuple()
    return f"cpython-{major}.{minor}-{sysconfig.get_platform()}"


def installed() -> str:
    """Constraints with the versions of this environment."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "freeze"], check=True, capture_output=True, text=True
    ).stdout
    return "".join(f"{line}\n" for line in listed.splitlines() if "==" in line and line[0] != "#")


def report(constraints: Path) -> list[dict[str, Any]]:
    """What pip would install, with hashes; nothing is."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
             "--report", file.name, "--constraint", str(constraints), f"{ROOT}[{EXTRAS}]",
             "setuptools>=77"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["install"]
    return found


def main() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(installed())
        file.flush()
        packages = report(Path(file.name))
    lines = [
        f"# platform: {tag()}",
        "# Made by scripts/lock_requirements.py. `make` installs from it on that platform, with",
        "# --require-hashes; elsewhere, and for torch, it goes by constraints.txt",
        "# (docs/decisions/0009-locked-requirements.md).",
    ]
    for package in sorted(packages, key=lambda each: each["metadata"]["name"].lower()):
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        if name not in NOT_LOCKED:
            digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={version} --hash=sha256:{digest}")
    LOCK.write_text("\n".join(lines) + "\n")
    print(f"{len(packages) - len(NOT_LOCKED)} packages in {LOCK.name}")


if __name__ == "__main__":
    main()
