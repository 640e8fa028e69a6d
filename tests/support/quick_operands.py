"""Operands of Triton's interpreter: most are of one type and shape already, or a number again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Key = tuple[Any, ...]
_CHECKED = tl.core.builtin(lambda: None).__code__  # of what looks for `_semantic` first


def interpreted(member: Any) -> Callable[..., Any]:
    """A function of the language as the interpreter calls it, with fewer calls on the way."""
    is_checked = getattr(member, "__code__", None) is _CHECKED
    function = member.__wrapped__ if is_checked else member
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
        return function(*args, **options, _semantic=semantic)

    return call


def quicken_operands(patch: pytest.MonkeyPatch) -> None:
    """The same types, shapes and refusals, found with fewer questions."""
    _unwrap_plain_values_first(patch)
    _leave_equal_operands_alone(patch)


def _unwrap_plain_values_first(patch: pytest.MonkeyPatch) -> None:
    unwrap, constant = tl.core._unwrap_if_constexpr, tl.constexpr
    plain = frozenset({tl.tensor, int, float, bool, type(None)})

    def quick(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else unwrap(value)

    patch.setattr(tl.core, "_unwrap_if_constexpr", quick)


def _leave_equal_operands_alone(patch: pytest.MonkeyPatch) -> None:
    agree = TritonSemantic.binary_op_type_checking_impl
    numbers: dict[Key, Any] = {}

    def quick(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if type(lhs) is tl.tensor:
            if type(rhs) is tl.tensor:
                if lhs.type is rhs.type and not div_or_mod and type(lhs.dtype) is tl.dtype:
                    return lhs, rhs
                if _go_together(lhs.dtype, rhs.dtype, *flags):
                    return self.broadcast_impl_value(lhs, rhs)
            elif (key := _key(lhs, rhs, flags)) is not None:
                # A number becomes a tensor of the other's type and shape, the same every time.
                if key not in numbers:
                    one, other = agree(self, lhs, rhs, *flags)
                    numbers[key] = other if one is lhs else None
                if (found := numbers[key]) is not None:
                    return lhs, found
        return agree(self, lhs, rhs, *flags)

    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", quick)


def _go_together(
    lhs: Any, rhs: Any, allow_lhs_ptr: bool, allow_rhs_ptr: bool, arithmetic: bool, division: bool
) -> bool:
    """Numbers of one type, of which no division asks for another, or a pointer and its offset."""
    if type(rhs) is not tl.dtype:
        return False
    if type(lhs) is tl.dtype:
        return not division and lhs.name == rhs.name
    return type(lhs) is tl.pointer_type and allow_lhs_ptr and rhs.is_int()


def _key(lhs: Any, number: Any, flags: Key) -> Key | None:
    """What the tensor of a number depends on; None where equal numbers may be different ones."""
    if type(number) not in (int, float, bool) or number != number or number == 0.0:
        return None
    if type(lhs.dtype) is not tl.dtype:
        return None
    return (type(number), number, lhs.type.name, *flags)
