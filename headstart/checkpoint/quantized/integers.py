"""Weights stored as integers in groups by AWQ and GPTQ (AutoRound, too), and what all such share.

All become a `GroupWeight` of 4 or 8 bits; codes of other widths are held in the next larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.described import Described
from headstart.checkpoint.quantized.names import PLAIN
from headstart.checkpoint.quantized.packing import WORD, awq_unpack, gptq_zeros, unpack
from headstart.checkpoint.quantized.stored import Rows, StoredWeight, load_scales
from headstart.checkpoint.quantized.weights import GroupWeight, pack_nibbles
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.errors import BadConfig, BrokenFile, MissingTensor, ShapeMismatch

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, TensorSource]


def awq(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """`qweight` [K, N/8], `qzeros` [K/g, N/8], `scales` [K/g, N]."""
    qweight = tensors[f"{module}.qweight"]
    scales = beside(module, "scales", tensors, PLAIN)
    groups, outputs = scales.shape if len(scales.shape) == 2 else (0, 0)
    columns = qweight.shape[0]
    zeros = _zeros(module, tensors, config)
    check(module, config, 4, columns, groups)
    expect(f"{module}.qweight", qweight, (columns, outputs // 8), "I32")
    if zeros is not None:
        expect(f"{module}.qzeros", zeros, (groups, outputs // 8), "I32")

    def read() -> GroupWeight:
        codes = awq_unpack(load(qweight)).t()
        middle = None if zeros is None else awq_unpack(load(zeros)).t()
        values = load_scales(f"{module}.scales", scales).t().contiguous()
        return held(4, codes, values, middle)

    names = ("qweight", "scales", *(["qzeros"] if zeros is not None else []))
    return stored(
        module, (outputs, columns), 4, groups, f"AWQ, 4 bits in groups of {columns // groups}",
        tuple(f"{module}.{name}" for name in names), lambda number: read().rows, scales.dtype,
    )  # fmt: skip


def gptq(module: str, tensors: Tensors, config: Described) -> StoredWeight:
    """`qweight` [K b/32, N], `qzeros` [K/g, N b/32], `scales` [K/g, N], `g_idx` [K]."""
    qweight, scales = tensors[f"{module}.qweight"], beside(module, "scales", tensors, PLAIN)
    zeros, order = _zeros(module, tensors, config), tensors.get(f"{module}.g_idx")
    groups, outputs = scales.shape if len(scales.shape) == 2 else (0, 0)
    bits = config.bits
    if zeros is not None and outputs and len(zeros.shape) == 2:
        bits = zeros.shape[1] * WORD // outputs
    if bits is None or not 2 <= bits <= 8:
        raise ShapeMismatch(
            f"{module}.qzeros is {_shape(zeros)} beside {module}.scales {scales.shape}: that is no "
            "number of bits from 2 to 8. Weight and scales do not belong together."
        )
    columns = qweight.shape[0] * WORD // bits
    if order is None and config.is_sorted:
        raise MissingTensor(
            f"{module}.g_idx is missing and the config says desc_act: which columns share a scale "
            "is not known. Download the checkpoint again."
        )
    check(module, config, bits, columns, groups)
    expect(f"{module}.qweight", qweight, (columns * bits // WORD, outputs), "I32")
    if zeros is not None:
        expect(f"{module}.qzeros", zeros, (groups, outputs * bits // WORD), "I32")
    if order is not None:
        expect(f"{module}.g_idx", order, (columns,), "I32")
    said = config.is_sorted if "round" in config.method else None

    def read() -> GroupWeight:
        codes = unpack(load(qweight).t(), bits, columns)
        middle = None
        if zeros is not None:
            middle = _gptq_zeros(load(zeros), bits, outputs, config).t()
            if config.is_symmetric:
                _check_middle(module, middle, bits)
        values = load_scales(f"{module}.scales", scales).t().contiguous()
        places = None
        if order is not None:
            places = places_of(f"{module}.g_idx", load(order), groups, said)
        return held(bits, codes, values, middle, places)

    sorted_ = ", columns sorted by group" if config.is_sorted else ""
    method = "AutoRound" if "round" in config.method else "GPTQ"
    names = ["qweight", "scales"] + [n for n in ("qzeros", "g_idx") if f"{module}.{n}" in tensors]
    return stored(
        module, (outputs, columns), bits, groups,
        f"{method}, {bits} bits in groups of {columns // groups}{sorted_}",
        tuple(f"{module}.{name}" for name in names), lambda number: read().rows, scales.dtype,
    )  # fmt: skip


def stored(
    module: str, shape: tuple[int, ...], bits: int, groups: int, words: str,
    names: tuple[str, ...], matrix: Callable[[int], Rows], scale_dtype: str,
) -> StoredWeight:  # fmt: skip
    form = f"int{4 if bits <= 4 else 8}-group"
    return StoredWeight(f"{module}.weight", shape, form, words, names, matrix, groups, scale_dtype)


def held(
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


def _gptq_zeros(words: torch.Tensor, bits: int, outputs: int, config: Described) -> torch.Tensor:
    """uint8 [K/g, N]."""
    if not config.stores_less_one:
        return unpack(words, bits, outputs)
    if WORD % bits:
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


def places_of(
    name: str, order: torch.Tensor, groups: int, is_sorted: bool | None
) -> torch.Tensor | None:
    """Columns sorted by group, `order` being the group of each; None where they are in order.

    `is_sorted`: what the config says, None where it leaves that to the file.
    """
    import torch

    size = len(order) // groups
    usual = torch.arange(len(order), dtype=order.dtype) // size
    if torch.equal(order, usual):
        return None
    is_known = int(order.min()) >= 0 and int(order.max()) < groups
    # Counted only then: a group that does not exist would take memory up to its number.
    if not is_known or not bool((torch.bincount(order.long(), minlength=groups) == size).all()):
        raise BrokenFile(
            f"{name} does not give each of {groups} groups {size} columns as this format has it. "
            "Download the checkpoint again."
        )
    if is_sorted is False:
        raise BadConfig(
            f"{name} gives columns to groups out of order and the config says that they are in "
            "order. Take config.json and weights from one release."
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


def beside(module: str, name: str, tensors: Tensors, dtypes: tuple[str, ...]) -> TensorSource:
    """What stands beside the weights of `module`, in one of `dtypes`."""
    found = tensors.get(f"{module}.{name}")
    if found is None:
        raise MissingTensor(
            f"{module}.{name} is missing, without which its weights cannot be read. Download the "
            "checkpoint again."
        )
    if found.dtype not in dtypes:
        raise ShapeMismatch(
            f"{module}.{name} is {found.dtype}; expected {' or '.join(dtypes)}. Weight and scales "
            "do not belong together."
        )
    return found


def check(module: str, config: Described, bits: int, columns: int, groups: int) -> None:
    """Refuse shapes that are no whole groups, or others than the config says."""
    if not groups or not columns or columns % groups:
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


def expect(
    name: str, source: TensorSource, shape: tuple[int, ...], dtype: str | None = None
) -> None:
    if source.shape != shape or (dtype is not None and source.dtype != dtype):
        raise ShapeMismatch(
            f"{name} is {source.dtype} {source.shape}; expected {dtype or source.dtype} {shape}. "
            "Weight and scales do not belong together."
        )


def _shape(source: TensorSource | None) -> tuple[int, ...] | None:
    return None if source is None else source.shape
