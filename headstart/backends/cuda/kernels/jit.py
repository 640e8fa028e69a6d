"""`jit` for our kernels: Triton's, with launches that can be turned into compilations.

A start on a new machine compiles dozens of kernels side by side before the first of them runs
(`backends/cuda/compiling.py`): inside `compiling_only` a launch compiles and writes nothing.

What was compiled is kept on disk, and loaded from there as machine code of this process, too.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import triton

from headstart.checkpoint.cache import compiled_folder, make_private

_VARIABLE = "TRITON_CACHE_DIR"
_FOLDER = "headstart-triton"
_only_compiles: ContextVar[bool] = ContextVar("_only_compiles", default=False)


class Kernel(triton.JITFunction):
    """A kernel whose launches run, or only compile it inside of `compiling_only`."""

    def run(self, *given: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        only_compiles = warmup or _only_compiles.get()
        return super().run(*given, grid=grid, warmup=only_compiles, **options)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Launches of this thread compile and do not run."""
    before = _only_compiles.set(True)
    try:
        yield
    finally:
        _only_compiles.reset(before)


def use_private_cache() -> None:
    """Let Triton keep what it compiles where no other user can write; ConfigError where one can.

    That is a folder inside of TRITON_CACHE_DIR, or of our own caches where that is not set.
    """
    folder = compiled_folder(_VARIABLE, _FOLDER)
    os.environ[_VARIABLE] = str(folder) if make_private(folder) else _of_this_process()


@cache
def _of_this_process() -> str:
    """Where nothing can be kept: every process compiles for itself."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = Path(made) / _FOLDER
    make_private(folder)
    return str(folder)


def jit(function: Any = None, *, do_not_specialize: Sequence[str] | None = None) -> Any:
    """Triton's decorator for our kernels; interpreted ones are Triton's own."""

    def decorate(function: Callable[..., None]) -> Any:
        if triton.knobs.runtime.interpret:
            return triton.jit(function, do_not_specialize=do_not_specialize)
        use_private_cache()
        return Kernel(function, do_not_specialize=do_not_specialize)

    return decorate if function is None else decorate(function)
