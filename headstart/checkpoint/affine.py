"""MLX's affine quantisation: groups of a row as small integers, with a scale and a bias for each.

A value is q * scale + bias. Integers lie packed in a row of 32-bit words, lowest bits first. Both
directions give what `mlx.core.quantize` and `mlx.core.dequantize` give on a CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.gguf.values import byte_blocks
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load, one_thread
from headstart.errors import BadConfig, ShapeMismatch

if TYPE_CHECKING:
    import torch

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_SMALLEST = 1e-7  # no scale is smaller
_VALUES_AT_ONCE = 1 << 17  # each becomes `bits` numbers on the way


@dataclass(frozen=True)
class Affine:
    """How the weights of a module are quantised."""

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group_size not in GROUPS:
            raise BadConfig(
                f"quantisation has bits {str(self.bits)[:20]} and group_size "
                f"{str(self.group_size)[:20]}; expected bits of {', '.join(map(str, BITS))} and "
                f"groups of {', '.join(map(str, GROUPS))}. The config is damaged, or of a kind "
                "that is not read here."
            )

    def words(self, width: int) -> int:
        """32-bit words that a row of `width` values takes."""
        return width * self.bits // 32

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape can be quantised so."""
        return len(shape) > 1 and 0 not in shape and shape[-1] % self.group_size == 0


def setting_of(settings: Mapping[str, Any], module: str, where: object) -> Affine:
    """How a module is quantised: by a setting of its own, else by that of all."""
    own = settings.get(module)
    found = {**settings, **own} if isinstance(own, dict) else settings
    bits, group = found.get("bits"), found.get("group_size")
    if found.get("mode", "affine") != "affine" or type(bits) is not int or type(group) is not int:
        raise BadConfig(
            f"{where}: {module[:80]} is quantised, and the config's quantization for it has mode "
            f"{str(found.get('mode'))[:20]}, bits {str(bits)[:20]}, group_size {str(group)[:20]}; "
            "expected affine with two numbers. Take it in BF16, or the original model."
        )
    return Affine(bits, group)


def quantized(source: TensorSource, how: Affine) -> dict[str, TensorSource]:
    """The `weight`, `scales` and `biases` of a plain weight."""
    groups = (*source.shape[:-1], source.shape[-1] // how.group_size)

    def part(number: int) -> Callable[[], Iterator[memoryview]]:
        def pieces() -> Iterator[memoryview]:
            with one_thread():
                for rows in _rows(source, source.shape[-1]):
                    yield as_bytes(_quantized(rows, how)[number])

        return pieces

    packed = (*source.shape[:-1], how.words(source.shape[-1]))
    return {
        "weight": TensorSource("U32", packed, part(0), is_copy=False),
        "scales": TensorSource(source.dtype, groups, part(1), is_copy=False),
        "biases": TensorSource(source.dtype, groups, part(2), is_copy=False),
    }


def dequantized(
    name: str, weight: TensorSource, scales: TensorSource, biases: TensorSource, how: Affine
) -> TensorSource:
    """The values of a quantised weight, in the dtype of its scales."""
    words, groups = weight.shape[-1:], scales.shape[-1:]
    width = groups[0] * how.group_size if groups else 0
    is_right = (
        weight.dtype == "U32"
        and scales.dtype in ("BF16", "F16", "F32")
        and (scales.dtype, scales.shape) == (biases.dtype, biases.shape)
        and weight.shape[:-1] == scales.shape[:-1]
        and words == (how.words(width),)
        and 0 not in weight.shape
    )
    if not is_right:
        raise ShapeMismatch(
            f"{name} is {weight.dtype} {list(weight.shape)} with scales {scales.dtype} "
            f"{list(scales.shape)} and biases {biases.dtype} {list(biases.shape)}; expected those "
            f"of {how.bits} bits in groups of {how.group_size}, as the config says. The files do "
            "not belong together: download them again."
        )

    def pieces() -> Iterator[memoryview]:
        parts = (_rows(each, width) for each in (weight, scales, biases))
        with one_thread():
            for packed, scale, bias in zip(*parts, strict=True):
                yield as_bytes(_dequantized(packed, scale, bias, how))

    return TensorSource(scales.dtype, (*weight.shape[:-1], width), pieces, is_copy=False)


def _rows(source: TensorSource, width: int) -> Iterator[torch.Tensor]:
    """Some rows at a time, as many of every tensor that belongs to rows of `width` values."""
    row = byte_size(source.dtype, source.shape[-1:])
    count = max(1, _VALUES_AT_ONCE // width)
    for raw in byte_blocks(source, count * row):
        yield _held(source, raw, len(raw) // row)


def _held(source: TensorSource, raw: bytes, count: int) -> torch.Tensor:
    shape = (count, source.shape[-1])
    return load(TensorSource(source.dtype, shape, lambda: (raw,), is_copy=False))


def _quantized(rows: torch.Tensor, how: Affine) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    top = (1 << how.bits) - 1
    values = rows.to(torch.float32).view(len(rows), -1, how.group_size)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    scale = ((high - low) / top).clamp_min(_SMALLEST)
    is_low = low.abs() > high.abs()
    scale = torch.where(is_low, scale, -scale)
    edge = torch.where(is_low, low, high)  # the value that is kept exactly
    first = torch.round(edge / scale)
    scale = torch.where(first != 0, edge / first, scale)
    bias = torch.where(first == 0, torch.zeros_like(edge), edge)
    numbers = torch.round((values - bias) / scale).clamp(0, top).to(torch.int64)
    packed = _packed(numbers.view(len(rows), -1), how.bits)
    return packed, scale.squeeze(-1).to(rows.dtype), bias.squeeze(-1).to(rows.dtype)


def _packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers as rows of 32-bit words; `bits` numbers of 32 bits hold 32 of `bits`."""
    import torch

    each = torch.arange(bits, device="cpu")
    flat = (numbers.unsqueeze(-1) >> each) & 1  # lowest bit first
    words = flat.view(len(numbers), -1, 32) << torch.arange(32, device="cpu")
    return words.sum(-1).to(torch.uint32)


def _dequantized(
    packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, how: Affine
) -> torch.Tensor:
    import torch

    bits = (packed.to(torch.int64).unsqueeze(-1) >> torch.arange(32, device="cpu")) & 1
    each = bits.view(len(packed), -1, how.bits) << torch.arange(how.bits, device="cpu")
    numbers = each.sum(-1).view(len(packed), -1, how.group_size).to(scale.dtype)
    values = numbers * scale.unsqueeze(-1) + bias.unsqueeze(-1)
    return values.view(len(packed), -1)
