"""Loops over vectors in LLVM's own language, whose sums stay in registers.

Compilers leave such sums in memory where loops are written in Python, which takes several times
longer. Vectors have a fixed size that LLVM cuts to what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

LANES = 16  # numbers in a vector
VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INT32, _INT64, _BYTES = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()


def load(build: Any, address: Any, kind: Any) -> Any:
    loaded = build.load(build.inttoptr(address, kind.as_pointer()))
    loaded.align = 4
    return loaded


def broadcast(build: Any, value: Any) -> Any:
    """A vector of the same number."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    one = build.insert_element(nothing, value, _INT32(0))
    return build.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_INT32, LANES), None))


def fma(build: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = get_or_insert_function(build.module, kind, f"llvm.fma.v{LANES}f32")
    return build.call(function, [a, b, c])


def prefetch(build: Any, address: Any) -> None:
    """Ask for what will be read soon. Processors do so themselves within a page only."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
    function = get_or_insert_function(build.module, kind, "llvm.prefetch.p0")
    to_read, into_second_cache, data = _INT32(0), _INT32(2), _INT32(1)
    build.call(function, [build.inttoptr(address, _BYTES), to_read, into_second_cache, data])


def loop(
    build: Any, times: Any, starts: list[Any], step: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`step(number, values)` gives the next values; those after the last time. Once at least."""
    before = build.block
    again, after = build.append_basic_block("loop"), build.append_basic_block("after")
    build.branch(again)
    build.position_at_end(again)
    number = build.phi(_INT64)
    number.add_incoming(_INT64(0), before)
    values = [build.phi(start.type) for start in starts]
    following = step(number, values)
    for value, start, then in zip(values, starts, following, strict=True):
        value.add_incoming(start, before)
        value.add_incoming(then, build.block)  # another than the first if a loop is inside
    count = build.add(number, _INT64(1))
    number.add_incoming(count, build.block)
    build.cbranch(build.icmp_signed("<", count, times), again, after)
    build.position_at_end(after)
    return list(following)


def choose(build: Any, number: Any, cases: Sequence[Callable[[], None]]) -> None:
    """Run the case of that number; none of them gives a value."""
    after = build.append_basic_block("after")
    chosen = build.switch(number, after)
    for value, case in enumerate(cases):
        block = build.append_basic_block("case")
        chosen.add_case(_INT64(value), block)
        build.position_at_end(block)
        case()
        build.branch(after)
    build.position_at_end(after)
