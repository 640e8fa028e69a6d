"""Arithmetic of Triton's interpreter: operators of most values with few calls on the way.

What is no plain number goes the interpreter's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Operator = Callable[..., Any]
_PLAIN = frozenset({  # numpy has no bf16, and its bool is no integer
    "int16", "int32", "int64", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64",
})  # fmt: skip
_OFFSETS = frozenset({"int16", "int32", "int64"})
_POINTERS = {"add": (True, True), "sub": (True, False), "mul": ()}  # which operands may be one
_COMPUTED: dict[str, Operator] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARED: dict[str, Operator] = {
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater,
    "greater_equal": np.greater_equal, "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip
# Methods of a tensor that only unwrap the other operand: sums have an argument more.
_SUMS = {"__add__": "add", "__sub__": "sub", "__mul__": "mul"}
_METHODS = {
    "__lt__": "less_than", "__le__": "less_equal", "__gt__": "greater_than",
    "__ge__": "greater_equal", "__eq__": "equal", "__ne__": "not_equal", "__and__": "and_",
    "__or__": "or_", "__floordiv__": "floordiv", "__mod__": "mod", "__truediv__": "truediv",
}  # fmt: skip


def quicken_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """The same results, with fewer questions about types that are known to agree."""
    for name, compute in _COMPUTED.items():
        patch.setattr(TritonSemantic, name, _computed(name, compute))
    for name, compare in _COMPARED.items():
        patch.setattr(TritonSemantic, name, _compared(name, compare))


def methods() -> dict[str, Operator]:
    """Operators of tensors, as Python calls them."""
    return {
        **{name: _sum(semantic) for name, semantic in _SUMS.items()},
        **{name: _method(semantic) for name, semantic in _METHODS.items()},
    }


def _sum(name: str) -> Operator:
    semantic, core = interpreter.interpreter_semantic, tl.core

    def call(self: Any, other: Any) -> Any:
        return getattr(semantic, name)(self, core._unwrap_if_constexpr(other), True)

    return call


def _method(name: str) -> Operator:
    semantic, core = interpreter.interpreter_semantic, tl.core

    def call(self: Any, other: Any) -> Any:
        return getattr(semantic, name)(self, core._unwrap_if_constexpr(other))

    return call


def _computed(name: str, compute: Operator) -> Operator:
    slow, may_point = getattr(TritonSemantic, name), _POINTERS[name]

    def quick(self: Any, lhs: Any, rhs: Any, sanitize_overflow: Any) -> Any:
        if name == "add" and (kind := _moved(lhs, rhs)) is not None:
            return tl.tensor(self.builder.create_addptr(lhs.handle, rhs.handle), kind)
        kind = _common(lhs, rhs)
        if kind is None:
            lhs, rhs = self.binary_op_type_checking_impl(lhs, rhs, *may_point)
            kind = _common(lhs, rhs)
        if kind is None:
            return slow(self, lhs, rhs, sanitize_overflow)
        return tl.tensor(self.builder.binary_op(lhs.handle, rhs.handle, compute), kind)

    return quick


def _compared(name: str, compare: Operator) -> Operator:
    slow = getattr(TritonSemantic, name)

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        kind = _common(lhs, rhs)
        if kind is None:
            lhs, rhs = self.binary_op_type_checking_impl(lhs, rhs)
            kind = _common(lhs, rhs)
        if kind is None:
            return slow(self, lhs, rhs)
        if not hasattr(kind, "compared"):
            kind.compared = kind.with_element_ty(tl.int1)
        return tl.tensor(self.builder.binary_op(lhs.handle, rhs.handle, compare), kind.compared)

    return quick


def _common(lhs: Any, rhs: Any) -> Any:
    """The type of a result, where numpy finds its shape as Triton does; None where it may not."""
    if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
        return None
    name = lhs.dtype.name
    if name not in _PLAIN or rhs.dtype.name != name:
        return None
    one, other = lhs.type, rhs.type
    if one is other or type(other) is tl.dtype:
        return one
    if type(one) is tl.dtype:
        return other
    shape = _shape(one, other)
    return None if shape is None else tl.block_type(one.scalar, shape)


def _moved(lhs: Any, rhs: Any) -> Any:
    """The type of pointers after such offsets; None where there are none, or it is not certain."""
    if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
        return None
    pointer, one, other = lhs.dtype, lhs.type, rhs.type
    if type(pointer) is not tl.pointer_type or rhs.dtype.name not in _OFFSETS:
        return None
    if type(other) is tl.dtype:
        return one
    shape = other.shape.values if one is pointer else _shape(one, other)
    if shape is None:
        return None
    blocks = pointer.__dict__.setdefault("blocks", {})
    if (key := tuple(shape)) not in blocks:
        blocks[key] = tl.block_type(pointer, shape)
    return blocks[key]


def _shape(one: Any, other: Any) -> list[int] | None:
    left, right = one.shape.values, other.shape.values
    if left == right:
        return left
    pairs = list(zip(left, right, strict=False))
    if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in pairs):
        return None
    return [max(pair) for pair in pairs]
