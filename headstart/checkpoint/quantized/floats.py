"""Weights stored as small floats: FP8 with one scale per tensor, row or block; MXFP8, MXFP4, NVFP4.

FP8 (e4m3) by rows or 128 x 128 blocks becomes an `Fp8Weight`. The others, which no form of the
engine has, are read as values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.described import Described
from headstart.checkpoint.quantized.packing import E2M1, POWER_BIAS
from headstart.checkpoint.quantized.stored import Rows, StoredWeight, load_scales
from headstart.checkpoint.quantized.weights import FP8_BLOCK, Fp8Weight
from headstart.checkpoint.source import TensorSource, reshaped, rows
from headstart.checkpoint.values import load, to_float32
from headstart.errors import BrokenFile, MissingTensor, ShapeMismatch

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, TensorSource]
POWERS = ("U8", "F8_E8M0")  # types of scales that are exponents of two
_RANKS = (2, 4, 8, 16)  # numbers of devices that a fused qkv_proj is stored for
# Codes of the largest numbers, without the sign: greater ones are infinite or no numbers.
_LARGEST = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
_SIGN = 0x80


def fp8(name: str, scale_name: str, tensors: Tensors, config: Described) -> StoredWeight:
    """`weight` F8 [..., N, K] with scales per tensor, row, or block of each matrix."""
    weight, scale = tensors[name], tensors[scale_name]
    block = _block(name, weight, scale_name, scale, config)
    *_, count, columns = weight.shape
    inner = _ranks(name, weight, scale)  # matrices with blocks of their own, one below another
    is_ours = weight.dtype == "F8_E4M3" and (inner == 1 or count // inner % FP8_BLOCK == 0)
    if block is None or block == (FP8_BLOCK, FP8_BLOCK):
        by = "row" if block is None else "block"
        form, words = f"fp8-{by}" if is_ours else "values", f"FP8, one scale per {by}"
    else:
        form, words = "values", f"FP8 in blocks of {block[0]}x{block[1]}"
    flat = reshaped(weight, (prod(weight.shape[:-1]), columns))

    def matrix(number: int) -> Rows:
        import torch

        scales = load_scales(scale_name, scale).to(torch.float32)
        if bool((scales < 0).any()):  # no package stores such
            raise BrokenFile(
                f"{scale_name} holds a scale below 0 beside {name}, which is FP8; expected the "
                "size of its largest value. Download the checkpoint again."
            )
        if block is None:
            own = scales.reshape(-1).expand(prod(weight.shape[:-1]))
            own = own[number * count : (number + 1) * count]
        else:
            own = scales.reshape(prod(weight.shape[:-2]), -1, scales.shape[-1])[number]

        def read(start: int, stop: int) -> Fp8Weight | torch.Tensor:
            first = number * count
            part = _load_codes(name, rows(flat, first + start, first + stop))
            if block is None:
                held = Fp8Weight(part, own[start:stop].contiguous())
                return held if is_ours else held.dequantized(torch.float32)
            if form == "fp8-block":
                blocks = slice(start // FP8_BLOCK, -(-stop // FP8_BLOCK))
                return Fp8Weight(part, own[blocks].contiguous())
            high, wide = block
            each = count // inner  # rows of a matrix whose blocks start anew
            at = torch.arange(start, stop)
            at = at // each * -(-each // high) + at % each // high
            return to_float32(part) * own[at].repeat_interleave(wide, 1)[:, :columns]

        return read

    return StoredWeight(name, weight.shape, form, words, (name, scale_name), matrix)


def _block(
    name: str, weight: TensorSource, scale_name: str, scale: TensorSource, config: Described
) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None for one per row, or one in all."""
    if len(weight.shape) in (2, 3) and 0 not in weight.shape:
        *experts, count, columns = weight.shape
        if scale.shape in ((), (1,), (*experts, count), (*experts, count, 1)):
            return None
        high, wide = config.block or (FP8_BLOCK, FP8_BLOCK)
        if config.group_size is not None and config.group_size > 0:
            high, wide = 1, config.group_size
        inner = _ranks(name, weight, scale)
        if scale.shape == (*experts, inner * -(-(count // inner) // high), -(-columns // wide)):
            return high, wide
    raise ShapeMismatch(
        f"{scale_name} has shape {scale.shape} beside {name} {weight.shape}; expected one value "
        f"per {FP8_BLOCK}x{FP8_BLOCK} block (of each expert), per row, or one in all. Weight and "
        "scale do not belong together; take both from one release."
    )


def _ranks(name: str, weight: TensorSource, scale: TensorSource) -> int:
    """How many matrices lie one below the other in a fused q, k, v, each with blocks of its own.

    MiMo-V2.5 stores one for each of several ranks; where their rows are no multiple of a block, the
    number of scales tells.
    """
    if len(weight.shape) != 2 or not name.endswith("qkv_proj.weight"):
        return 1
    count, stored = weight.shape[0], scale.shape[0] if len(scale.shape) == 2 else 0
    if stored in (count, -(-count // FP8_BLOCK)):
        return 1
    fitting = [n for n in _RANKS if count % n == 0 and n * -(-(count // n) // FP8_BLOCK) == stored]
    return fitting[0] if len(fitting) == 1 else 1


def has_blocks_of_powers(weight: TensorSource, scale: TensorSource, config: Described) -> bool:
    """Whether scales that are powers of two stand for blocks, as DeepSeek-V4 stores FP8."""
    if scale.dtype != "F8_E8M0" or config.block is None or len(weight.shape) != 2:
        return False
    return scale.shape == tuple(-(-n // s) for n, s in zip(weight.shape, config.block, strict=True))


def mxfp8(name: str, scale_name: str, tensors: Tensors) -> StoredWeight:
    """`weight` F8 [N, K], a power of two for 32 columns."""
    weight = tensors[name]
    size = _group(name, weight.shape, scale_name, tensors[scale_name], 32)

    def values(part: torch.Tensor, scales: torch.Tensor, number: int) -> torch.Tensor:
        return to_float32(part) * _powers(scales).repeat_interleave(size, -1)

    return _read_as_values(name, weight.shape, "MXFP8", (name, scale_name), tensors, values)


def mxfp4(name: str, packed: str, scale_name: str, tensors: Tensors) -> StoredWeight:
    """Bytes [N, K/2] of two 4-bit floats each, a power of two for 32 columns."""
    shape = _unpacked(tensors[packed])
    size = _group(packed, shape, scale_name, tensors[scale_name], 32)

    def values(part: torch.Tensor, scales: torch.Tensor, number: int) -> torch.Tensor:
        return _e2m1(part) * _powers(scales).repeat_interleave(size, -1)

    return _read_as_values(name, shape, "MXFP4", (packed, scale_name), tensors, values)


def nvfp4(
    name: str, packed: str, scale_name: str, whole_name: str, tensors: Tensors, *, divides: bool
) -> StoredWeight:
    """Two e2m1 in a byte, an e4m3 scale for 16 columns, one fp32 scale for all.

    compressed-tensors divides by the last (`divides`), ModelOpt multiplies.
    """

    shape = _unpacked(tensors[packed])
    if whole_name not in tensors:
        raise MissingTensor(
            f"{whole_name} is missing, without which {packed} cannot be read. Download the "
            "checkpoint again."
        )
    size = _group(packed, shape, scale_name, tensors[scale_name], 16)
    stack = prod(shape[:-2])
    if prod(tensors[whole_name].shape) not in (1, stack) or tensors[whole_name].dtype != "F32":
        raise ShapeMismatch(
            f"{whole_name} is {tensors[whole_name].dtype} {tensors[whole_name].shape} beside "
            f"{packed} {tensors[packed].shape}; expected one F32 value for each matrix, or one in "
            "all. Weight and scale do not belong together."
        )

    def values(part: torch.Tensor, scales: torch.Tensor, number: int) -> torch.Tensor:
        whole = load_scales(whole_name, tensors[whole_name]).reshape(-1).expand(stack)[number]
        if not whole:
            raise BrokenFile(f"{whole_name} holds a scale of 0. Download the checkpoint again.")
        scales = to_float32(scales) / whole if divides else to_float32(scales) * whole
        return _e2m1(part) * scales.repeat_interleave(size, -1)

    names = (packed, scale_name, whole_name)
    return _read_as_values(name, shape, "NVFP4", names, tensors, values)


def _read_as_values(
    name: str, shape: tuple[int, ...], words: str, names: tuple[str, ...], tensors: Tensors,
    values: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
) -> StoredWeight:  # fmt: skip
    """What is stored row by row beside scales [..., N, groups]; the first two of `names` are."""
    weight, scale = (
        reshaped(tensors[n], (prod(shape[:-1]), tensors[n].shape[-1])) for n in names[:2]
    )
    count = shape[-2]

    def matrix(number: int) -> Rows:
        def read(start: int, stop: int) -> torch.Tensor:
            first, last = number * count + start, number * count + stop
            scales = load_scales(names[1], rows(scale, first, last))
            return values(_load_codes(names[0], rows(weight, first, last)), scales, number)

        return read

    return StoredWeight(name, shape, "values", words, names, matrix)


def _load_codes(name: str, source: TensorSource) -> torch.Tensor:
    """Small floats as they are stored; BrokenFile where one of 8 bits is no finite number."""
    import torch

    codes, largest = load(source), _LARGEST.get(source.dtype)
    if largest is None or not codes.numel():
        return codes
    # Positive codes are the largest of signed bytes, negative ones of unsigned bytes: two passes
    # over them that write nothing.
    high, low = codes.view(torch.int8).amax(), codes.view(torch.uint8).amax()
    if int(high) > largest or int(low) > largest + _SIGN:
        raise BrokenFile(
            f"{name} holds {source.dtype} codes that are no finite numbers. Download the "
            "checkpoint again."
        )
    return codes


def _group(
    name: str, shape: tuple[int, ...], scale_name: str, scale: TensorSource, size: int
) -> int:
    if scale.shape != (*shape[:-1], shape[-1] // size) or shape[-1] % size:
        raise ShapeMismatch(
            f"{scale_name} has shape {scale.shape} beside {name} of {shape[-1]} columns; expected "
            f"one value for each {size} of them. Weight and scale do not belong together."
        )
    return size


def _unpacked(packed: TensorSource) -> tuple[int, ...]:
    return (*packed.shape[:-1], 2 * packed.shape[-1])


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K/2] -> fp32 [..., K]; the even element in the low half, bit 3 is the sign."""
    import torch

    packed = packed.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    return torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127)."""
    import torch

    return torch.exp2(exponents.view(torch.uint8).float() - POWER_BIAS)
