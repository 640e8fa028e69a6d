"""Weights that compressed-tensors stores as integers: packed in words, or one in a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.described import Described
from headstart.checkpoint.quantized.integers import (
    Tensors,
    beside,
    check,
    expect,
    held,
    places_of,
    stored,
)
from headstart.checkpoint.quantized.names import PLAIN
from headstart.checkpoint.quantized.packing import WORD, unpack
from headstart.checkpoint.quantized.stored import StoredWeight, load_scales
from headstart.checkpoint.quantized.weights import GroupWeight
from headstart.checkpoint.source import TensorSource, reshaped, rows
from headstart.checkpoint.values import load
from headstart.errors import BrokenFile, MissingTensor, ShapeMismatch

if TYPE_CHECKING:
    import torch


def packed(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """pack-quantized: `weight_packed` [N, K b/32], `weight_scale` [N, K/g], `weight_shape`."""
    words, scales = tensors[f"{module}.weight_packed"], _scales(module, tensors)
    *leading, outputs, num_words = words.shape
    columns = _columns(module, words, tensors)
    fitting = [b for b in range(1, 9) if -(-columns * b // WORD) == num_words]
    bits = config.bits if config.bits in fitting else (fitting[0] if len(fitting) == 1 else None)
    if bits is None:
        raise ShapeMismatch(
            f"{module}.weight_packed is {words.shape} and weight_shape says {columns} columns; "
            f"expected {config.bits or 'some number of'} bits each. Config and weights do not "
            "belong together."
        )
    groups = scales.shape[-1] if scales.shape else 0
    check(module, config, bits, columns, groups)
    expect(f"{module}.weight_scale", scales, (*leading, outputs, groups))
    zeros = _zeros(module, tensors, config)
    is_packed = zeros is not None and zeros.dtype == "I32"
    if zeros is not None:
        high = -(-outputs * bits // WORD) if is_packed else outputs
        shape = (*leading, high, groups)
        expect(f"{module}.weight_zero_point", zeros, shape, "I32" if is_packed else "I8")
    order = _order(module, tensors, config, (*leading, columns))

    def read(number: int) -> GroupWeight:
        codes = unpack(load(_one(words, number)), bits, columns)
        values = load_scales(f"{module}.weight_scale", _one(scales, number))
        middle = None
        if zeros is not None:
            own = load(_one(zeros, number))
            middle = unpack(own.t(), bits, outputs).t() if is_packed else _unsigned(own, bits)
        places = _places(module, order, number, groups, config)
        return held(bits, codes, values, middle, places)

    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    return stored(
        module, (*leading, outputs, columns), bits, groups,
        f"compressed-tensors, {bits} bits in groups of {columns // groups}",
        tuple(f"{module}.{n}" for n in names if f"{module}.{n}" in tensors),
        lambda number: read(number).rows, scales.dtype,
    )  # fmt: skip


def int8(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """int-quantized: `weight` I8 [N, K], `weight_scale` [N, 1] or [N, K/g]."""
    weight, scales = tensors[f"{module}.weight"], _scales(module, tensors)
    *leading, outputs, columns = weight.shape
    shape = scales.shape
    if shape in ((), (1,)):
        groups = 1
    else:
        groups = shape[-1] if len(shape) == len(weight.shape) else 1
        if shape not in ((*leading, outputs), (*leading, outputs, groups)):
            raise ShapeMismatch(
                f"{module}.weight_scale has shape {shape} beside {module}.weight {weight.shape}; "
                "expected one value per row and group, per row, or one in all. Weight and scale "
                "do not belong together; take both from one release."
            )
    check(module, config, 8, columns, groups)
    zeros = _zeros(module, tensors, config)
    if zeros is not None:
        expect(f"{module}.weight_zero_point", zeros, shape, "I8")
    order = _order(module, tensors, config, (*leading, columns))

    def by_row(tensor: torch.Tensor, number: int) -> torch.Tensor:
        own = tensor if tensor.numel() == 1 else tensor.reshape(-1, outputs, groups)[number]
        return own.reshape(-1, groups).expand(outputs, groups)

    def read(number: int) -> GroupWeight:
        values = by_row(load_scales(f"{module}.weight_scale", scales), number).contiguous()
        middle = None if zeros is None else _unsigned(by_row(load(zeros), number), 8)
        places = _places(module, order, number, groups, config)
        return held(8, _unsigned(load(_one(weight, number)), 8), values, middle, places)

    by = "one scale per row" if groups == 1 else f"in groups of {columns // groups}"
    names = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")
    return stored(
        module, weight.shape, 8, groups, f"8-bit integers, {by}",
        tuple(f"{module}.{n}" for n in names if f"{module}.{n}" in tensors),
        lambda number: read(number).rows, scales.dtype,
    )  # fmt: skip


def _scales(module: str, tensors: Tensors) -> TensorSource:
    return beside(module, "weight_scale", tensors, PLAIN)


def _columns(module: str, words: TensorSource, tensors: Tensors) -> int:
    """How many columns `weight_shape` says; its other numbers are those of `weight_packed`."""
    source = beside(module, "weight_shape", tensors, ("I32", "I64"))
    *leading, outputs, _ = words.shape
    is_small = source.shape in ((2,), (len(words.shape),), (*leading, 2))
    said = load(source).reshape(-1, source.shape[-1]).tolist() if is_small else []
    columns = int(said[-1][-1]) if said else 0
    whole = [*leading, outputs, columns]
    if columns < 1 or any(row != whole[-len(row) :] for row in said):
        raise ShapeMismatch(
            f"{module}.weight_shape says {said or source.shape} beside {module}.weight_packed "
            f"{words.shape}; expected {outputs} rows and a number of columns. Weight and shape do "
            "not belong together."
        )
    return columns


def _zeros(module: str, tensors: Tensors, config: Described) -> TensorSource | None:
    found = tensors.get(f"{module}.weight_zero_point")
    if found is None and config.is_symmetric is False:
        raise MissingTensor(
            f"{module}.weight_zero_point is missing and the config says symmetric false. Download "
            "the checkpoint again."
        )
    return found


def _order(
    module: str, tensors: Tensors, config: Described, shape: tuple[int, ...]
) -> TensorSource | None:
    found = tensors.get(f"{module}.weight_g_idx")
    if found is None and config.is_sorted:
        raise MissingTensor(
            f"{module}.weight_g_idx is missing and the config says actorder: which columns share a "
            "scale is not known. Download the checkpoint again."
        )
    if found is not None:
        expect(f"{module}.weight_g_idx", found, shape, "I32")
    return found


def _places(
    module: str, order: TensorSource | None, number: int, groups: int, config: Described
) -> torch.Tensor | None:
    """What is stored decides: all -1 is in order, too."""
    if order is None:
        return None
    own = load(order).reshape(-1, order.shape[-1])[number]
    if bool((own == -1).all()):
        return None
    return places_of(f"{module}.weight_g_idx", own, groups, config.is_sorted)


def _one(source: TensorSource, number: int) -> TensorSource:
    """A matrix of a stack."""
    if len(source.shape) < 3:
        return source
    return reshaped(rows(source, number, number + 1), source.shape[1:])


def _unsigned(values: torch.Tensor, bits: int) -> torch.Tensor:
    import torch

    moved = values.to(torch.int16).add_(2 ** (bits - 1))
    if bits < 8 and not bool(((moved >= 0) & (moved < 2**bits)).all()):
        raise BrokenFile(
            f"a zero point is outside of the range of {bits} bits. Download the checkpoint again."
        )
    return moved.to(torch.uint8)
