"""numba, which compiles the CPU kernels, and where its results are kept.

Every module with kernels takes `njit` from here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from headstart.checkpoint.cache import compiled_folder, make_private


def njit(*, fastmath: set[str] | None = None, inline: str = "never") -> Any:
    """numba's decorator: compiled once per machine, and without a lock on Python."""
    import numba

    def compiled(function: Callable[..., Any]) -> Any:
        with _kept() as is_kept:
            made = numba.njit(
                cache=is_kept, nogil=True, error_model="numpy",
                fastmath=fastmath or False, inline=inline,
            )(function)  # fmt: skip
            if is_kept:
                _let_fail(made._cache)
            return made

    return compiled


def compiled_for_c(function: Callable[..., Any], signature: Any) -> Any:
    """The same, compiled now, for calls by address: what comes back has `address`."""
    import numba

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    with _kept() as is_kept:
        try:
            return numba.cfunc(signature, cache=is_kept, **options)(function)
        except OSError as error:
            if not is_kept:
                raise
            _failures.append(error)
            return numba.cfunc(signature, cache=False, **options)(function)


_failures: list[OSError] = []  # of keeping what was compiled, on a full disk for instance


def _let_fail(cache: Any) -> None:
    """Compiled code that cannot be kept is used all the same."""
    save = cache.save_overload

    def save_if_possible(signature: Any, data: Any) -> None:
        try:
            save(signature, data)
        except OSError as error:
            _failures.append(error)

    cache.save_overload = save_if_possible


def kept_note() -> str:
    """Where compiled code is kept, or why it is not."""
    folder = kept_in()
    if _failures:
        why = _failures[-1].strerror or str(_failures[-1])
        return f"not kept: {folder} could not be written ({why}), so every start compiles again"
    if not make_private(folder):
        return f"not kept: {folder} cannot be written, so every start compiles again"
    return f"compiled once, kept in {folder}"


@contextmanager
def _kept() -> Iterator[bool]:
    """Whether results are kept; if not, every process compiles for itself."""
    import numba

    before, folder = numba.config.CACHE_DIR, kept_in()
    is_kept = make_private(folder)
    numba.config.CACHE_DIR = str(folder)
    try:
        yield is_kept
    finally:  # a program may have kernels of its own
        numba.config.CACHE_DIR = before


def why_missing() -> str | None:
    """What keeps this machine from compiling, or None."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if not hasattr(os, "sched_yield"):
        return "the kernels need a POSIX system"
    try:
        import_module("numba")
    except ImportError as error:  # made for another numpy, for instance
        return f"numba does not load ({error})"
    return None


def kept_in() -> Path:
    """The folder of compiled code, which numba loads as pickles: only the user may write there."""
    return compiled_folder("NUMBA_CACHE_DIR", f"kernels-{_digest()}")


@cache
def _digest() -> str:
    """Of all kernels: numba itself would not notice a change in a function that is called."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
