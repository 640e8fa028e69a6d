"""This checkout with its entry point, as an installer leaves it, in a folder of its own."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from headstart import __version__

_ROOT = Path(__file__).parents[2]
_GROUP = "vllm.general_plugins"


def install(work: Path) -> Path:
    """A folder for PYTHONPATH; vLLM finds the plugin there by its metadata."""
    site = work / "site"
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_ROOT / "headstart", site / "headstart", ignore=skipped)
    facts = site / f"headstart-{__version__}.dist-info"
    facts.mkdir()
    named = f"Metadata-Version: 2.1\nName: headstart\nVersion: {__version__}\n"
    (facts / "METADATA").write_text(named)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {place}" for name, place in project["entry-points"][_GROUP].items()]
    (facts / "entry_points.txt").write_text("\n".join([f"[{_GROUP}]", *lines, ""]))
    return site
