"""Headstart installed for an environment that has vLLM, as users install it, in a folder apart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]


def plugin_site(python: Path, work: Path) -> Path:
    """A folder for PYTHONPATH: the package with its entry point, of the tree as it is now."""
    work.mkdir(parents=True, exist_ok=True)
    # pip builds inside the folder that it is given; the repository stays as it is.
    source, site = work.resolve() / "plugin-source", work.resolve() / "plugin-site"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_REPOSITORY / name, source / name)
    shutil.copytree(
        _REPOSITORY / "headstart",
        source / "headstart",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    words = ["install", "-q", "--no-deps", "--target", str(site), str(source)]
    subprocess.run([str(python), "-m", "pip", *words], check=True, stdout=sys.stderr)
    return site
