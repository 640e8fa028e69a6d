"""Products behind one call: a pass is compiled once, whatever formats its matrices have.

A matrix is a row of eight int64: where the compiled product of its format begins, where its arrays
lie, and its sizes. Each format is compiled by itself, when the first matrix of it is held, and
every layer may have another one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headstart.backends.numba.compiler import compiled_for_c, njit

# Of a matrix. ORDER: int32 [WIDTH], which input comes where, or 0; DETAIL: what a format needs.
PRODUCT, WEIGHTS, SCALES, BIAS, ORDER, WIDTH, OUTPUTS, DETAIL = range(8)
FIELDS = 8

_WORDS, _FLOATS = types.CPointer(types.int64), types.CPointer(types.float32)
# counters, phase, x [rows, WIDTH], rows, a matrix, out [rows, OUTPUTS], whether it adds to `out`
_SIGNATURE = types.void(_WORDS, types.int64, _FLOATS, types.int64, _WORDS, _FLOATS, types.int64)


_LINE = 64  # bytes that a processor reads at a time


def aligned_empty(count: int) -> np.ndarray:
    """Bytes that begin with a line of the cache: no vector then lies across two.

    numpy asks for large pages, torch does not: walking through small ones takes a third longer.
    """
    whole = np.empty(count + _LINE, np.uint8)
    start = -whole.ctypes.data % _LINE
    return whole[start : start + count]


class Product:
    """The product of a format, as a decorator: compiled when its address is first asked for."""

    def __init__(self, function: Callable[..., None]):
        self._function = function

    @cached_property
    def _compiled(self) -> Any:
        return compiled_for_c(self._function, _SIGNATURE)

    @property
    def address(self) -> int:
        return int(self._compiled.address)


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> tuple[Any, Any]:
        """What begins at an address, for `carray`."""
        target = types.CPointer(kind)

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            return build.inttoptr(arguments[0], context.get_value_type(target))

        return target(types.int64), generate

    return pointer


floats_at, int8_at, int32_at, bytes_at = map(
    _pointer_to, (types.float32, types.int8, types.int32, types.uint8)
)


@intrinsic
def _call(
    typing: Any, function: Any, counters: Any, phase: Any, x: Any, rows: Any, matrix: Any, out: Any,
    adds: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The product at an address, with arguments as `_SIGNATURE` has them."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        function, *values = arguments
        kinds = [context.get_value_type(kind) for kind in _SIGNATURE.args]
        for place, kind in enumerate(kinds):
            if isinstance(kind, ir.PointerType):
                values[place] = build.inttoptr(values[place], kind)
        target = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        build.call(build.inttoptr(function, target), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@njit()
def apply(counters, phase, x, matrices, layer, out, adds):
    """Rows x [rows, K] through one layer's matrix, in the way of its format: one phase."""
    matrix = matrices[layer]
    _call(
        matrix[PRODUCT], counters.ctypes.data, phase, x.ctypes.data, x.shape[0],
        matrix.ctypes.data, out.ctypes.data, adds,
    )  # fmt: skip


@njit()
def apply_alone(counters, x, matrices, out):
    """The same as a call of its own."""
    apply(counters, 0, x, matrices, 0, out, False)
