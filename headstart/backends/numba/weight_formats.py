"""Which form weights are packed in, by what is asked for and how they are stored."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TypeGuard

import torch
from torch import nn

from headstart.backends.numba import eight_bit_products, group_products
from headstart.backends.numba.eight_bit_linear import PackedEightBits
from headstart.backends.numba.linear import Packed, PackedFloat, PackedGroups, PackedLinear
from headstart.backends.weights import WeightFormat, int4_linear
from headstart.checkpoint.quantized.rounding import INT4_GROUP
from headstart.models.linear import Linear
from headstart.models.quantized import GroupLinear, QuantizedLinear


def is_by_row(source: Linear) -> TypeGuard[GroupLinear]:
    """Whether it is 8-bit integers around zero with one scale per output."""
    if not isinstance(source, GroupLinear) or source.bits != 8 or source.zeros is not None:
        return False
    return source.scales.shape[-1] == 1 and source.inputs is None


def is_read_as_stored(source: QuantizedLinear) -> bool:
    """Whether the kernels have a format for it."""
    if is_by_row(source) or eight_bit_products.takes(source.quantized):
        return True
    return isinstance(source, GroupLinear) and group_products.takes(source.quantized)


def widened_notes(parts: Iterable[nn.Module]) -> list[str]:
    """About weights that are stored quantised and computed in float32."""
    quantized = [m for part in parts for m in part.modules() if isinstance(m, QuantizedLinear)]
    found = [own for own in quantized if not is_read_as_stored(own)]
    if not found:
        return []
    stored = sum(held.nbytes for own in found for held in (*own.parameters(), *own.buffers()))
    wide = sum(4 * prod(own.quantized.shape) for own in found)
    return [
        f"{len(found)} weights that are stored quantised are computed in float32, {wide / 1e6:.2f} "
        f"MB in place of {stored / 1e6:.2f} MB: the kernels read groups of a multiple of 32 inputs "
        "(4 bits) or 4 (8 bits), and widths that are a multiple of 4"
    ]


def packed_if_stored(source: Linear) -> Linear | Packed:
    """What is quantised as the kernels have it in 4 or 8 bits; others as they are."""
    if is_by_row(source):
        return PackedLinear.of_rows(source)
    if isinstance(source, GroupLinear) and group_products.takes(source.quantized):
        return PackedGroups(source)
    if isinstance(source, QuantizedLinear) and eight_bit_products.takes(source.quantized):
        return PackedEightBits(source)
    return source


def packed_as_stored(source: Linear) -> Packed:
    """The same, and others in float32."""
    held = packed_if_stored(source)
    return held if isinstance(held, Packed) else PackedFloat(_plain(source))


def packed_int8(source: Linear) -> Packed:
    """int8 for what is stored as plain numbers; what is quantised already stays as it is."""
    return packed_as_stored(source) if isinstance(source, QuantizedLinear) else PackedLinear(source)


def packed_int4(source: Linear) -> Packed:
    """4 bits in groups of 32; int8 where a matrix has no whole number of groups."""
    if isinstance(source, QuantizedLinear):
        return packed_as_stored(source)
    if source.weight.shape[1] % INT4_GROUP:
        return PackedLinear(source)
    return PackedGroups(int4_linear(source))


# By `weights` of the options.
FORMS: dict[str, WeightFormat] = {
    "as-dtype": packed_as_stored,
    "int8": packed_int8,
    "int4": packed_int4,
}


# The same for models that the kernels do not run as a whole.
PRODUCTS: dict[str, WeightFormat] = {**FORMS, "as-dtype": packed_if_stored}


def _plain(source: Linear) -> Linear:
    if not isinstance(source, QuantizedLinear):
        return source
    result = Linear(0, 0)
    result.weight = nn.Parameter(source.dequantized(torch.float32), requires_grad=False)
    result.bias = source.bias
    return result
