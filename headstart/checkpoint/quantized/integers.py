"""Weights stored as integers in groups: AWQ, GPTQ (AutoRound, too), compressed-tensors.

All become a `GroupWeight` of 4 or 8 bits; codes of other widths are held in the next larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.described import Described
from headstart.checkpoint.quantized.packing import awq_unpack, gptq_zeros, unpack
from headstart.checkpoint.quantized.stored import Rows, StoredWeight, load_scales
from headstart.checkpoint.quantized.weights import GroupWeight, pack_nibbles
from headstart.checkpoint.source import TensorSource, reshaped, rows
from headstart.checkpoint.values import load
from headstart.errors import BadConfig, BrokenFile, MissingTensor, ShapeMismatch

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, TensorSource]
_WORD = 32


def awq(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """`qweight` [K, N/8], `qzeros` [K/g, N/8], `scales` [K/g, N]."""
    qweight = tensors[f"{module}.qweight"]
    scales = _beside(module, "scales", tensors)
    groups, outputs = scales.shape if len(scales.shape) == 2 else (0, 0)
    columns = qweight.shape[0]
    zeros = _zeros(module, tensors, config)
    _check(module, config, 4, columns, groups)
    _expect(f"{module}.qweight", qweight, (columns, outputs // 8), "I32")
    if zeros is not None:
        _expect(f"{module}.qzeros", zeros, (groups, outputs // 8), "I32")

    def read() -> GroupWeight:
        codes = awq_unpack(load(qweight)).t()
        held = None if zeros is None else awq_unpack(load(zeros)).t()
        values = load_scales(f"{module}.scales", scales).t().contiguous()
        return _held(4, codes, values, held)

    names = ("qweight", "scales", *(["qzeros"] if zeros is not None else []))
    return _stored(
        module, (outputs, columns), 4, groups, f"AWQ, 4 bits in groups of {columns // groups}",
        tuple(f"{module}.{name}" for name in names), lambda number: _whole(read()), scales.dtype,
    )  # fmt: skip


def gptq(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """`qweight` [K b/32, N], `qzeros` [K/g, N b/32], `scales` [K/g, N], `g_idx` [K]."""
    qweight, scales = tensors[f"{module}.qweight"], _beside(module, "scales", tensors)
    zeros, order = _zeros(module, tensors, config), tensors.get(f"{module}.g_idx")
    groups, outputs = scales.shape if len(scales.shape) == 2 else (0, 0)
    bits = config.bits
    if zeros is not None and outputs and len(zeros.shape) == 2:
        bits = zeros.shape[1] * _WORD // outputs
    if bits is None or not 2 <= bits <= 8:
        raise ShapeMismatch(
            f"{module}.qzeros is {_shape(zeros)} beside {module}.scales {scales.shape}: that is no "
            "number of bits from 2 to 8. Weight and scales do not belong together."
        )
    columns = qweight.shape[0] * _WORD // bits
    if order is None and config.is_sorted:
        raise MissingTensor(
            f"{module}.g_idx is missing and the config says desc_act: which columns share a scale "
            "is not known. Download the checkpoint again."
        )
    _check(module, config, bits, columns, groups)
    _expect(f"{module}.qweight", qweight, (columns * bits // _WORD, outputs), "I32")
    if zeros is not None:
        _expect(f"{module}.qzeros", zeros, (groups, outputs * bits // _WORD), "I32")
    if order is not None:
        _expect(f"{module}.g_idx", order, (columns,), "I32")

    def read() -> GroupWeight:
        codes = unpack(load(qweight).t(), bits, columns)
        held = None
        if zeros is not None:
            held = _gptq_zeros(load(zeros), bits, outputs, config).t()
            if config.is_symmetric:
                _check_middle(module, held, bits)
        values = load_scales(f"{module}.scales", scales).t().contiguous()
        places = None if order is None else _places(module, load(order), groups, config)
        return _held(bits, codes, values, held, places)

    sorted_ = ", columns sorted by group" if config.is_sorted else ""
    method = "AutoRound" if "round" in config.method else "GPTQ"
    names = ["qweight", "scales"] + [n for n in ("qzeros", "g_idx") if f"{module}.{n}" in tensors]
    return _stored(
        module, (outputs, columns), bits, groups,
        f"{method}, {bits} bits in groups of {columns // groups}{sorted_}",
        tuple(f"{module}.{name}" for name in names), lambda number: _whole(read()), scales.dtype,
    )  # fmt: skip


def packed(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """compressed-tensors' pack-quantized: `weight_packed` [N, K b/32], `weight_scale` [N, K/g]."""
    words, scales = tensors[f"{module}.weight_packed"], _beside(module, "weight_scale", tensors)
    shape_source = _beside(module, "weight_shape", tensors)
    *leading, outputs, num_words = words.shape
    columns = int(load(shape_source).reshape(-1)[-1])
    fitting = [b for b in range(1, 9) if -(-columns * b // _WORD) == num_words]
    bits = config.bits if config.bits in fitting else (fitting[0] if len(fitting) == 1 else None)
    if bits is None:
        raise ShapeMismatch(
            f"{module}.weight_packed is {words.shape} and weight_shape says {columns} columns; "
            f"expected {config.bits or 'some number of'} bits each. Config and weights do not "
            "belong together."
        )
    groups = scales.shape[-1]
    zeros = _ct_zeros(module, tensors, config)
    _check(module, config, bits, columns, groups)
    _expect(f"{module}.weight_scale", scales, (*leading, outputs, groups))
    order = tensors.get(f"{module}.weight_g_idx")

    def read(number: int) -> GroupWeight:
        codes = unpack(load(_one(words, number)), bits, columns)
        values = load_scales(f"{module}.weight_scale", _one(scales, number))
        held = None
        if zeros is not None:
            own = load(_one(zeros, number))
            is_packed = zeros.dtype == "I32"
            held = unpack(own.t(), bits, outputs).t() if is_packed else _unsigned(own, bits)
        places = None
        if order is not None and config.is_sorted is not False:
            places = _places(module, load(order), groups, config)
        return _held(bits, codes, values, held, places)

    beside = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    return _stored(
        module, (*leading, outputs, columns), bits, groups,
        f"compressed-tensors, {bits} bits in groups of {columns // groups}",
        tuple(f"{module}.{n}" for n in beside if f"{module}.{n}" in tensors),
        lambda number: _whole(read(number)), scales.dtype,
    )  # fmt: skip


def int8(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """compressed-tensors' int-quantized: `weight` I8 [N, K], `weight_scale` [N, 1] or [N, K/g]."""

    weight, scales = tensors[f"{module}.weight"], _beside(module, "weight_scale", tensors)
    *leading, outputs, columns = weight.shape
    zeros = _ct_zeros(module, tensors, config)
    shape = scales.shape
    if shape in ((), (1,)):
        groups = 1
    else:
        groups = shape[-1] if len(shape) == len(weight.shape) else 1
        if shape not in ((*leading, outputs), (*leading, outputs, groups)) or columns % groups:
            raise ShapeMismatch(
                f"{module}.weight_scale has shape {shape} beside {module}.weight {weight.shape}; "
                "expected one value per row and group, per row, or one in all. Weight and scale "
                "do not belong together; take both from one release."
            )
    _check(module, config, 8, columns, groups)

    def by_row(tensor: torch.Tensor, number: int) -> torch.Tensor:
        own = tensor if tensor.numel() == 1 else tensor.reshape(-1, outputs, groups)[number]
        return own.reshape(-1, groups).expand(outputs, groups)

    def read(number: int) -> GroupWeight:
        values = by_row(load_scales(f"{module}.weight_scale", scales), number).contiguous()
        held = None if zeros is None else _unsigned(by_row(load(zeros), number), 8)
        return _held(8, _unsigned(load(_one(weight, number)), 8), values, held)

    beside = ("weight", "weight_scale", "weight_zero_point")
    return _stored(
        module, weight.shape, 8, groups, "8-bit integers, " + _grouped(groups, columns),
        tuple(f"{module}.{n}" for n in beside if f"{module}.{n}" in tensors),
        lambda number: _whole(read(number)), scales.dtype,
    )  # fmt: skip


def _grouped(groups: int, columns: int) -> str:
    return "one scale per row" if groups == 1 else f"in groups of {columns // groups}"


def _stored(
    module: str, shape: tuple[int, ...], bits: int, groups: int, words: str,
    names: tuple[str, ...], matrix: Callable[[int], Rows], scale_dtype: str,
) -> StoredWeight:  # fmt: skip
    form = f"int{4 if bits <= 4 else 8}-group"
    return StoredWeight(f"{module}.weight", shape, form, words, names, matrix, groups, scale_dtype)


def _whole(weight: GroupWeight) -> Rows:
    return weight.rows


def _held(
    bits: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
    order: torch.Tensor | None = None,
) -> GroupWeight:  # fmt: skip
    """Codes [N, K] of any width, their columns in `order`, as the engine holds them."""
    import torch

    wide = 4 if bits <= 4 else 8
    if bits != wide and zeros is None:
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
    if zeros is not None and bool((zeros == 2 ** (wide - 1)).all()):
        zeros = None
    if order is not None:
        codes = codes[:, order]
    codes = codes.contiguous()
    if wide == 4 and codes.shape[1] % 2:
        raise ShapeMismatch(
            f"a matrix in 4 bits has {codes.shape[1]} columns; expected an even number."
        )
    inputs = None if order is None else order.to(torch.int32)
    weight = pack_nibbles(codes) if wide == 4 else codes
    return GroupWeight(wide, weight, scales, None if zeros is None else zeros.contiguous(), inputs)


def _one(source: TensorSource, number: int) -> TensorSource:
    """A matrix of a stack."""
    if len(source.shape) < 3:
        return source
    return reshaped(rows(source, number, number + 1), source.shape[1:])


def _unsigned(values: torch.Tensor, bits: int) -> torch.Tensor:
    import torch

    moved = values.to(torch.int16).add_(2 ** (bits - 1))
    return moved.to(torch.uint8)


def _gptq_zeros(words: torch.Tensor, bits: int, outputs: int, config: Described) -> torch.Tensor:
    """uint8 [K/g, N]."""
    if not config.stores_less_one:
        return unpack(words, bits, outputs)
    if _WORD % bits:
        return unpack(words, bits, outputs).add_(1).bitwise_and_(2**bits - 1)
    return unpack(gptq_zeros(words, bits), bits, outputs)


def _check_middle(module: str, zeros: torch.Tensor, bits: int) -> None:
    middle = 2 ** (bits - 1)
    if not bool((zeros == middle).all()):
        other = int(zeros[zeros != middle][0])
        raise BrokenFile(
            f"{module}.qzeros means a zero point of {other} and the config says sym, which is "
            f"{middle}: is checkpoint_format (gptq, gptq_v2) or packing_format right? Correct the "
            "config, or download the checkpoint again."
        )


def _places(
    module: str, order: torch.Tensor, groups: int, config: Described
) -> torch.Tensor | None:
    """Columns sorted by group; None where they are in order."""
    import torch

    size = len(order) // groups
    usual = torch.arange(len(order), dtype=order.dtype) // size
    if torch.equal(order, usual):
        return None
    counts = torch.bincount(order.clamp(min=0).long(), minlength=groups)
    is_even = len(counts) == groups and bool((counts == size).all()) and int(order.min()) >= 0
    if config.is_sorted is False and "round" in config.method:
        is_even = False
    if not is_even:
        raise BrokenFile(
            f"{module}.g_idx does not give each of {groups} groups {size} columns as this format "
            "has it. Download the checkpoint again."
        )
    return torch.argsort(order, stable=True)


def _zeros(module: str, tensors: Tensors, config: Described) -> TensorSource | None:
    found = tensors.get(f"{module}.qzeros")
    if found is None and config.is_symmetric is not True:
        raise MissingTensor(
            f"{module}.qzeros is missing and the config does not say that weights have none (sym, "
            "or zero_point false). Download the checkpoint again."
        )
    return found


def _ct_zeros(module: str, tensors: Tensors, config: Described) -> TensorSource | None:
    found = tensors.get(f"{module}.weight_zero_point")
    if found is None and config.is_symmetric is False:
        raise MissingTensor(
            f"{module}.weight_zero_point is missing and the config says symmetric false. Download "
            "the checkpoint again."
        )
    return found


def _beside(module: str, name: str, tensors: Tensors) -> TensorSource:
    found = tensors.get(f"{module}.{name}")
    if found is None:
        raise MissingTensor(
            f"{module}.{name} is missing, without which its weights cannot be read. Download the "
            "checkpoint again."
        )
    return found


def _check(module: str, config: Described, bits: int, columns: int, groups: int) -> None:
    """Refuse shapes that are no whole groups, or others than the config says."""
    if not groups or columns % groups:
        raise ShapeMismatch(
            f"{module} has {columns} columns and {groups} scales per row, which is no whole number "
            "of columns each. Weight and scales do not belong together."
        )
    size = columns // groups
    said = columns if config.group_size == -1 else config.group_size
    if said is not None and said != size:
        raise BadConfig(
            f"{module} has one scale for {size} columns and the config says group_size "
            f"{config.group_size}. Config and weights do not belong together."
        )
    if config.bits is not None and config.bits != bits:
        raise BadConfig(
            f"{module} is stored in {bits} bits and the config says {config.bits}. Config and "
            "weights do not belong together."
        )


def _expect(
    name: str, source: TensorSource, shape: tuple[int, ...], dtype: str | None = None
) -> None:
    if source.shape != shape or (dtype is not None and source.dtype != dtype):
        raise ShapeMismatch(
            f"{name} is {source.dtype} {source.shape}; expected {dtype or source.dtype} {shape}. "
            "Weight and scales do not belong together."
        )


def _shape(source: TensorSource | None) -> tuple[int, ...] | None:
    return None if source is None else source.shape
