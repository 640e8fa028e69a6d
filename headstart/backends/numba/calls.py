"""Calls by address: a pass is compiled once, whatever its layers do and whatever formats they have.

A matrix is a row of eight int64: where the compiled product of its format begins, where its arrays
lie, and its sizes. A step of a layer (attention, an MLP, ...) is such a row as well: its first
number is where the compiled step begins, what follows is the step's own business. Each format and
each kind of step is compiled by itself, when the first of it is held.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from headstart.backends.numba.compiler import compiled_for_c, njit

# Of a matrix. ORDER: int32 [WIDTH], which input comes where, or 0; DETAIL: what a format needs.
PRODUCT, WEIGHTS, SCALES, BIAS, ORDER, WIDTH, OUTPUTS, DETAIL = range(8)
FIELDS = 8

_WORDS, _FLOATS = types.CPointer(types.int64), types.CPointer(types.float32)
# counters, phase, x [rows, WIDTH], rows, a matrix, out [rows, OUTPUTS], the mode
_SIGNATURE = types.void(_WORDS, types.int64, _FLOATS, types.int64, _WORDS, _FLOATS, types.int64)
# What a product does with `out`: writes it, adds to it, or writes it and goes on before all of it
# is there.
WRITES, ADDS, WRITES_ON = range(3)
# counters, phase, the pass, a step; returns the phases that it took
_STEP_SIGNATURE = types.int64(_WORDS, types.int64, _WORDS, _WORDS)

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

    signature = _SIGNATURE

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    @cached_property
    def _compiled(self) -> Any:
        return compiled_for_c(self._function, self.signature)

    @property
    def address(self) -> int:
        return int(self._compiled.address)


class Step(Product):
    """The same for a kind of step."""

    signature = _STEP_SIGNATURE


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> tuple[Any, Any]:
        """What begins at an address, for `carray`."""
        target = types.CPointer(kind)

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            return build.inttoptr(arguments[0], context.get_value_type(target))

        return target(types.int64), generate

    return pointer


floats_at, int8_at, int32_at, bytes_at, words_at = map(
    _pointer_to, (types.float32, types.int8, types.int32, types.uint8, types.int64)
)


def _generate_call(signature: Any) -> Callable[..., Any]:
    """Code that calls the function at an address; all its arguments are int64."""

    def generate(context: Any, build: Any, _: Any, arguments: Any) -> Any:
        function, *values = arguments
        kinds = [context.get_value_type(kind) for kind in signature.args]
        for place, kind in enumerate(kinds):
            if isinstance(kind, ir.PointerType):
                values[place] = build.inttoptr(values[place], kind)
        result = context.get_value_type(signature.return_type)
        is_void = signature.return_type == types.void
        target = ir.FunctionType(ir.VoidType() if is_void else result, kinds).as_pointer()
        returned = build.call(build.inttoptr(function, target), values)
        return context.get_dummy_value() if is_void else returned

    return generate


@intrinsic
def _call(
    typing: Any, function: Any, counters: Any, phase: Any, x: Any, rows: Any, matrix: Any, out: Any,
    mode: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The product at an address, with arguments as `_SIGNATURE` has them."""
    return types.void(*[types.int64] * 8), _generate_call(_SIGNATURE)


@intrinsic
def _call_step(
    typing: Any, function: Any, counters: Any, phase: Any, work: Any, step: Any
) -> tuple[Any, Any]:
    """The step at an address, with arguments as `_STEP_SIGNATURE` has them."""
    return types.int64(*[types.int64] * 5), _generate_call(_STEP_SIGNATURE)


@njit()
def multiply(counters, phase, x, matrix, out, mode):
    """Rows x [rows, K] through the matrix at an address, in the way of its format: one phase."""
    product = carray(words_at(matrix), (FIELDS,))[PRODUCT]
    _call(
        product, counters.ctypes.data, phase, x.ctypes.data, x.shape[0], matrix, out.ctypes.data,
        mode,
    )  # fmt: skip


@njit()
def run_step(counters, phase, work, step):
    """One step of a layer; returns the phase behind its last."""
    return phase + _call_step(
        step[PRODUCT], counters.ctypes.data, phase, work.ctypes.data, step.ctypes.data
    )


@njit()
def apply(counters, phase, x, matrices, out):
    """The same for a matrix that is the only one of an array [1, FIELDS]."""
    multiply(counters, phase, x, matrices.ctypes.data, out, WRITES)


@njit()
def apply_alone(counters, x, matrices, out):
    """The same as a call of its own."""
    apply(counters, 0, x, matrices, out)
