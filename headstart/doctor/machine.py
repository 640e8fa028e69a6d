"""What this machine and this installation have: versions, devices, backends, and why not others.

torch takes seconds to import, so it is asked only where a driver names a GPU: whether torch can use
it is known to torch alone. Everything else is read from files and metadata.
"""

from __future__ import annotations

import ast
import importlib.util
import platform
import shutil
import time
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headstart import __version__
from headstart.backends.host import available_bytes, usable_cores
from headstart.backends.numba.compiler import why_missing
from headstart.bench.environment import gpus, processor_name
from headstart.errors import first_line
from headstart.files import read_text

_PACKAGES = (
    "torch", "transformers", "safetensors", "tokenizers", "numpy", "triton", "numba", "xgrammar",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Machine:
    versions: dict[str, str | None]  # None: not installed
    cpu: str
    cores: int
    free_bytes: int  # memory that this process may still take
    gpus: list[str]  # as the driver names them
    backends: dict[str, str | None]  # why not; None where nothing known speaks against it
    problems: list[str] = field(default_factory=list)  # what is there and does not work
    torch_seconds: float | None = None  # what importing torch took; None where it was not

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def look_around() -> Machine:
    """Read what there is; imports torch only where there is a GPU."""
    versions: dict[str, str | None] = {"headstart": __version__}
    versions["python"] = platform.python_version()
    versions |= {name: package_version(name) for name in _PACKAGES}
    versions["torch's CUDA"] = torch_cuda()
    found, began = gpus(), time.perf_counter()
    no_torch = None if versions["torch"] else "torch is not installed"
    no_kernels, seconds = _why_not_tried(found, versions), None
    if no_kernels is None:
        no_torch, no_kernels = _why_no_torch()
        seconds = time.perf_counter() - began
    no_numba = why_missing()
    backends = {"cuda": no_kernels, "numba": no_numba, "torch": no_torch}
    broken = [
        reason
        for name, reason in (("numba", no_numba), ("torch", no_torch))
        if reason is not None and versions[name]
    ]
    return Machine(
        versions=versions,
        cpu=processor_name(),
        cores=usable_cores(),
        free_bytes=available_bytes(),
        gpus=found,
        backends=backends,
        problems=broken,
        torch_seconds=seconds,
    )


def package_version(name: str) -> str | None:
    """None where the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA or ROCm that torch was built for, read from its files; None for a CPU's build."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        file = Path(folder) / "version.py"
        if file.is_file():
            values = _assigned(read_text(file))
            return values.get("cuda") or (f"ROCm {values['hip']}" if values.get("hip") else None)
    return None


def _assigned(source: str) -> dict[str, str]:
    """Names that are given a text at the top of a module."""
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        text = node.value.value if isinstance(node.value, ast.Constant) else None
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and isinstance(text, str):
                found[target.id] = text
    return found


def _why_not_tried(found: list[str], versions: dict[str, str | None]) -> str | None:
    """What keeps the fused kernels from running on a GPU, as far as it is known without torch."""
    if not found:
        return "nvidia-smi names no GPU"
    if not versions["torch's CUDA"]:
        return f"torch {versions['torch']} is built without CUDA; install one that has it"
    if not versions["triton"]:
        return "triton is not installed"
    if not (shutil.which("cc") or shutil.which("gcc")):
        return "Triton needs a C compiler (cc or gcc) to build its launchers, and there is none"
    return None


def _why_no_torch() -> tuple[str | None, str | None]:
    """What keeps torch from being used at all, and on a GPU; imports it."""
    try:
        cuda = import_module("torch").cuda
    except Exception as error:  # libraries of another driver, most likely
        reason = f"torch does not load ({first_line(error)})"
        return reason, reason
    try:
        is_there = cuda.is_available()
    except Exception as error:
        return None, f"torch finds no GPU ({first_line(error)})"
    unseen = "torch sees no GPU: its CUDA and the driver do not fit, or none is visible"
    return None, None if is_there else unseen
