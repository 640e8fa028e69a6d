"""Triton's interpreter without what costs most of its time and shows nothing in a whole engine.

The tests of single kernels run without this: with every check of the interpreter, and with the
cuts of a GPU.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

from headstart.gpu import forward
from headstart.kernels.attention import Cut


def quicken(patch: pytest.MonkeyPatch) -> None:
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another release of Triton: slower, but right
    _prepare_once_per_launch(patch)
    # Offsets into tensors of some kilobytes do not overflow; checking that takes a fourth.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    # 64 pieces keep a GPU busy. Here all but the first are empty programs; two have work to do.
    patch.setattr(forward, "_cut", lambda seats, rows: Cut(pieces=2, least=1, step=16))


def _prepare_once_per_launch(patch: pytest.MonkeyPatch) -> None:
    """Replace the language's functions once per launch, not at every call inside of it, too."""
    prepare = interpreter._patch_lang
    builtins: dict[Any, list[tuple[str, Any]]] = {}
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    is_prepared = False

    def prepare_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            found = inspect.getmembers(package)
            builtins[package] = [(n, m) for n, m in found if tl.core.is_builtin(m)]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    def prepare_once(fn: Any) -> Any:
        nonlocal is_prepared
        if is_prepared:
            return None  # a call inside a launch, which does not look at the result
        scope = prepare(whole_language)
        restore = scope.restore

        def end() -> None:
            nonlocal is_prepared
            is_prepared = False
            restore()

        scope.restore, is_prepared = end, True
        return scope

    patch.setattr(interpreter, "_patch_builtin", prepare_builtins)
    patch.setattr(interpreter, "_patch_lang", prepare_once)
