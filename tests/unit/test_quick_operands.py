"""Operands and results of the quick interpreter are those of Triton's own, and so are refusals."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from support.quick_interpreter import quicken
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NUMBERS = {
    "int32": np.int32, "int64": np.int64, "uint32": np.uint32, "fp32": np.float32,
    "fp16": np.float16,
}  # fmt: skip
SHAPES = [(), (4,), (1, 4), (2, 1), (2, 4)]
OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.lt, operator.le, operator.gt, operator.ge,
    operator.eq, operator.ne, operator.and_, operator.or_, operator.floordiv, operator.mod,
    operator.truediv,
]  # fmt: skip
KINDS = {name: getattr(tl, name.replace("fp", "float")) for name in NUMBERS}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not hasattr(interpreter, "_LangPatchScope"):
        pytest.skip("this release of Triton is interpreted as it is")


def tensor(name: str, shape: tuple[int, ...]) -> Any:
    data = np.arange(1, 1 + int(np.prod(shape)), dtype=NUMBERS[name]).reshape(shape or (1,))
    kind = tl.block_type(KINDS[name], list(shape)) if shape else KINDS[name]
    return tl.tensor(interpreter.TensorHandle(data, KINDS[name]), kind)


def pointers(shape: tuple[int, ...]) -> Any:
    kind = tl.pointer_type(tl.float32)
    handle = interpreter.TensorHandle(np.arange(4, dtype=np.uint64).reshape(shape), kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)))


def found(one: Any, other: Any, **flags: bool) -> Any:
    """Type, shape and numbers of both operands, or what is said against them."""
    agree = TritonSemantic.binary_op_type_checking_impl
    try:
        pair = agree(interpreter.interpreter_semantic, one, other, **flags)
    except Exception as error:
        return type(error), str(error)
    # As text: 0.0 and -0.0 are equal.
    return [(str(own.type), own.handle.data.dtype, repr(own.handle.data.tolist())) for own in pair]


@contextmanager
def in_a_launch() -> Iterator[None]:
    """The language as kernels find it in Triton's own interpreter."""
    prepared = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        yield
    finally:
        prepared.restore()


def assert_quick(find: Callable[[], list[Any]]) -> None:
    """By Triton's own interpreter, then twice by the quick one, which remembers numbers."""
    with in_a_launch():
        wanted = find()
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        for _ in range(2):
            assert find() == wanted


def assert_same(cases: list[tuple[Any, Any, dict[str, bool]]]) -> None:
    assert_quick(lambda: [found(one, other, **flags) for one, other, flags in cases])


def result(compute: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Type, shape and numbers of what an operator gives, or what is said against it."""
    try:
        own = compute(one, other)
    except Exception as error:
        return type(error), str(error)
    return str(own.type), own.handle.dtype, own.handle.data.dtype, repr(own.handle.data.tolist())


@pytest.mark.parametrize("name", KINDS)
def test_operators_give_what_tritons_do(name: str) -> None:
    own = [
        tensor(name, (4,)),
        tensor(name, ()),
        tensor(name, (1, 4)),
        pointers((4,)),
        pointers((4, 1)),
    ]
    others = [
        *(tensor(other, shape) for other in KINDS for shape in ((), (4,), (2, 1), (2, 4), (8, 2))),
        pointers((4,)), 3, 0.5, -2, tl.constexpr(2),
    ]  # fmt: skip
    assert_quick(lambda: [result(one, a, b) for one in OPERATORS for a in own for b in others])
    with in_a_launch():
        pairs = [result(operator.add, pointers((4,)), other) for other in others]
    assert any("pointer" in str(kind) for kind, *_ in pairs), "offsets are added to pointers"


@pytest.mark.parametrize("name", NUMBERS)
def test_operands_have_the_types_shapes_and_numbers_of_triton(name: str) -> None:
    assert_same([
        (tensor(name, left), tensor(other, right), {"div_or_mod": division})
        for other in NUMBERS for left in SHAPES for right in SHAPES for division in (False, True)
    ])  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_becomes_the_same_tensor(name: str) -> None:
    numbers = (3, 3.0, True, 1, 0.0, -0.0, 0, -2, 0.5, 2**40, 1e300, float("inf"), float("nan"))
    assert_same([
        (*pair, {"div_or_mod": division})
        for number in numbers for shape in SHAPES for division in (False, True)
        for pair in ((tensor(name, shape), number), (number, tensor(name, shape)))
    ])  # fmt: skip


def test_pointers_take_offsets_and_nothing_else() -> None:
    others = [*(tensor(name, (4,)) for name in NUMBERS), pointers((4,)), 2, 0.5]
    assert_same([
        (pointers((4,)), other, {"allow_lhs_ptr": left, "allow_rhs_ptr": right})
        for other in others for left in (True, False) for right in (True, False)
    ])  # fmt: skip
    _, said = found(pointers((4,)), tensor("fp32", (4,)), allow_lhs_ptr=True)
    assert "invalid operands" in said
