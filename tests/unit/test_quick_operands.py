"""Operands of the quick interpreter are those of Triton's own, and what it refuses is refused."""

from __future__ import annotations

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


def assert_same(cases: list[tuple[Any, Any, dict[str, bool]]]) -> None:
    """All by Triton's own interpreter, then twice by the quick one, which remembers numbers."""
    wanted = [found(one, other, **flags) for one, other, flags in cases]
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        for _ in range(2):
            assert [found(one, other, **flags) for one, other, flags in cases] == wanted


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
