"""Weights in block types of GGUF and in MLX's affine groups.

Q4_0, Q5_0 and Q8_0 are integers in groups of 32 with a scale of 16 bits, which is a form of the
engine: they become a `GroupWeight`, bit for bit. Types that add a minimum to every group (Q4_1,
K-quants, MLX's) or look values up are read as values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from headstart.checkpoint import affine
from headstart.checkpoint.dtypes import GGUF_TYPES, byte_size
from headstart.checkpoint.gguf.encoding import dequantized, require_readable
from headstart.checkpoint.quantized.stored import Rows, StoredWeight
from headstart.checkpoint.quantized.weights import GroupWeight, pack_nibbles
from headstart.checkpoint.source import TensorSource, reshaped, rows
from headstart.checkpoint.values import load
from headstart.errors import BrokenFile, MissingTensor, UnsupportedFamily

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, TensorSource]
_FORMS = {"Q4_0": "int4-group", "Q5_0": "int8-group", "Q8_0": "int8-group"}
_GROUP, _HALF = 32, 16
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_STACK = ".switch_mlp."  # what MLX calls a stack of experts


def gguf_blocks(name: str, tensors: Tensors) -> StoredWeight:
    """A weight [..., N, K] in one of GGUF's block types."""
    source = tensors[name]
    kind, (*_, count, columns) = source.dtype, source.shape
    if kind not in _FORMS:
        require_readable(kind)
    flat = reshaped(source, (prod(source.shape[:-1]), columns))

    def matrix(number: int) -> Rows:
        own = rows(flat, number * count, (number + 1) * count)
        # Whole, because what is computed from files would be computed again for every part.
        raw = load(
            TensorSource("U8", (count, byte_size(kind, (columns,))), own.pieces, own.is_copy)
        )

        def read(start: int, stop: int) -> GroupWeight | torch.Tensor:
            import torch

            part = raw[start:stop]
            if kind in _FORMS:
                return _group_weight(name, kind, part)
            values = dequantized(kind, part.contiguous().numpy().reshape(-1))
            return torch.from_numpy(values).view(stop - start, columns)

        return read

    groups = columns // _GROUP if kind in _FORMS else 1
    form = _FORMS.get(kind, "values")
    return StoredWeight(name, source.shape, form, f"GGUF {kind}", (name,), matrix, groups, "F16")


def _group_weight(name: str, kind: str, raw: torch.Tensor) -> GroupWeight:
    """Rows of whole blocks, each a scale, for Q5_0 the fifth bits, and the numbers."""
    import torch

    blocks = raw.reshape(len(raw), -1, GGUF_TYPES[kind][2])
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if not torch.isfinite(scales).all():
        raise BrokenFile(
            f"{name} ({kind}) holds a scale that is no finite number, so that its weights would "
            "all become NaN. Download the file again."
        )
    if kind == "Q8_0":  # signed numbers become unsigned ones around 128
        return GroupWeight(8, (blocks[..., 2:] ^ 0x80).flatten(-2), scales)
    packed = blocks[..., -_HALF:]
    codes = torch.cat([packed & 15, packed >> 4], dim=-1)  # low halves come first
    if kind == "Q4_0":
        return GroupWeight(4, pack_nibbles(codes.flatten(-2)), scales)
    places = torch.arange(8, dtype=torch.uint8)
    fifth = ((blocks[..., 2:6].unsqueeze(-1) >> places) & 1).flatten(-2)
    zeros = torch.full(scales.shape, 16, dtype=torch.uint8)
    return GroupWeight(8, (codes | (fifth << 4)).flatten(-2), scales, zeros)


def mlx_affine(
    name: str, module: str, tensors: Tensors, settings: Mapping[str, Any]
) -> StoredWeight:
    """`weight` U32 with `scales` and `biases`; values are those of `mlx.core.dequantize`.

    `module`: under which name a config speaks of it.
    """
    stem = name.removesuffix("weight")
    parts = [tensors.get(f"{stem}{each}") for each in ("weight", "scales", "biases")]
    if parts[1] is None:
        raise MissingTensor(
            f"{name} is U32 and no scales are beside it, without which it cannot be read. Download "
            "the model again."
        )
    if parts[2] is None:
        raise UnsupportedFamily(
            f"{name} has scales and no biases: quantised in another way than MLX's affine one "
            "(mxfp4, nvfp4, ...), which is not read here. Take another quantisation of the model."
        )
    how = affine.setting_of(settings, _EXPERT.sub(_STACK, module), name)
    plain = affine.dequantized(name, tensors[name], parts[1], parts[2], how)
    *_, count, columns = plain.shape

    def matrix(number: int) -> Rows:
        import torch

        first = number * count
        cut = [rows(_flat(part), first, first + count) for part in parts if part is not None]
        values = load(affine.dequantized(name, cut[0], cut[1], cut[2], how))

        def read(start: int, stop: int) -> torch.Tensor:
            return values[start:stop].to(torch.float32)

        return read

    words = f"MLX, {how.bits} bits in groups of {how.group_size}"
    names = tuple(f"{stem}{each}" for each in ("weight", "scales", "biases"))
    return StoredWeight(name, (*plain.shape[:-2], count, columns), "values", words, names, matrix)


def _flat(source: TensorSource) -> TensorSource:
    return reshaped(source, (prod(source.shape[:-1]), source.shape[-1]))
