"""`jit` for our kernels: Triton's, with launches that can be turned into compilations.

A start on a new machine compiles dozens of kernels side by side before the first of them runs
(`backends/cuda/compiling.py`): inside `compiling_only` a launch compiles and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

_only_compiles: ContextVar[bool] = ContextVar("_only_compiles", default=False)


class Kernel(triton.JITFunction):  # type: ignore[misc]
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


def jit(function: Any = None, *, do_not_specialize: Sequence[str] | None = None) -> Any:
    """Triton's decorator for our kernels; interpreted ones are Triton's own."""

    def decorate(function: Callable[..., None]) -> Any:
        if triton.knobs.runtime.interpret:
            return triton.jit(function, do_not_specialize=do_not_specialize)
        return Kernel(function, do_not_specialize=do_not_specialize)

    return decorate if function is None else decorate(function)
