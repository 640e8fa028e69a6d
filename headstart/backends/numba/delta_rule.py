"""The gated delta rule of one row over some columns of a memory, whose sums stay in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.vectors import LANES, VECTOR, broadcast, fma, load, loop

COLUMNS = 64  # of a memory that rows go over together
_VECTORS = COLUMNS // LANES
_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)


def _places(build: Any, address: Any) -> list[Any]:
    return [build.add(address, _INT64(4 * LANES * n)) for n in range(_VECTORS)]


def _store(build: Any, value: Any, address: Any) -> None:
    build.store(value, build.inttoptr(address, VECTOR.as_pointer())).align = 4


@intrinsic
def _read(typing: Any, memory: Any, key: Any, count: Any, out: Any) -> tuple[Any, Any]:
    """Addresses: what a memory [count, COLUMNS] has for a key [count], into out [COLUMNS]."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        memory, key, count, out = arguments

        def add(number: Any, sums: list[Any]) -> list[Any]:
            line = build.add(memory, build.mul(number, _INT64(4 * COLUMNS)))
            factor = load(build, build.add(key, build.mul(number, _INT64(4))), _FLOAT)
            spread = broadcast(build, factor)
            parts = [load(build, place, VECTOR) for place in _places(build, line)]
            return [fma(build, spread, *pair) for pair in zip(parts, sums, strict=True)]

        results = loop(build, count, [ir.Constant(VECTOR, None)] * _VECTORS, add)
        for place, result in zip(_places(build, out), results, strict=True):
            _store(build, result, place)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@intrinsic
def _write(
    typing: Any, memory: Any, key: Any, query: Any, decay: Any, change: Any, count: Any, out: Any
) -> tuple[Any, Any]:
    """Addresses: the memory fades, takes a change [COLUMNS] under the key, and gives what it then
    has for the query, into out [COLUMNS]."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        memory, key, query, decay, change, count, out = arguments
        left = broadcast(build, decay)
        changes = [load(build, place, VECTOR) for place in _places(build, change)]

        def add(number: Any, sums: list[Any]) -> list[Any]:
            at = build.mul(number, _INT64(4))
            line = build.add(memory, build.mul(number, _INT64(4 * COLUMNS)))
            factor = broadcast(build, load(build, build.add(key, at), _FLOAT))
            asked = broadcast(build, load(build, build.add(query, at), _FLOAT))
            results = []
            for place, own, total in zip(_places(build, line), changes, sums, strict=True):
                faded = build.fmul(load(build, place, VECTOR), left)
                new = fma(build, factor, own, faded)
                _store(build, new, place)
                results.append(fma(build, asked, new, total))
            return results

        results = loop(build, count, [ir.Constant(VECTOR, None)] * _VECTORS, add)
        for place, result in zip(_places(build, out), results, strict=True):
            _store(build, result, place)
        return context.get_dummy_value()

    kinds = [types.intp] * 3 + [types.float32] + [types.intp] * 3
    return types.void(*kinds), generate


@njit()
def step(memory, key, query, value, decay, strength, out):
    """memory [K, COLUMNS] and out [COLUMNS] are written, value [COLUMNS] is read."""
    known, count = np.empty(COLUMNS, np.float32), memory.shape[0]
    _read(memory.ctypes.data, key.ctypes.data, count, known.ctypes.data)
    for i in range(COLUMNS):
        known[i] = (value[i] - known[i] * decay) * strength
    _write(
        memory.ctypes.data, key.ctypes.data, query.ctypes.data, decay, known.ctypes.data, count,
        out.ctypes.data,
    )  # fmt: skip
