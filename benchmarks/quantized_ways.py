"""Ways to multiply with 8- and 4-bit weights: each kernel in each cut that is worth trying."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from graph_timing import DEVICE
from quantized_weights import (
    DTYPE,
    Fp8Weight,
)
from torch import Tensor

from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.fp8_library import library_fp8, library_scales
from headstart.backends.cuda.kernels.eight_bits import (
    Fp8Rows,
    IntegerRows,
    silu_fp8,
    silu_integers,
)
from headstart.backends.cuda.kernels.fp8_products import choose_fp8, gated_fp8, partial_fp8
from headstart.backends.cuda.kernels.group_packing import (
    PackedGroups,
    dequantized_groups,
)
from headstart.backends.cuda.kernels.groups import choose_groups, partial_groups
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.rows import silu_product

Way = tuple[str, Callable[[Any], Any]]  # a name, and what it does with a copy of the weight


def splits_of(name: str, outputs: int, inputs: int, tile: int, rows: int) -> list[int]:
    """One to three programs for each processor, and two kilobytes of a line for each."""
    if name in ("gate_up", "lm_head"):
        return [1]
    programs = -(-outputs // tile) * -(-rows // 128)
    fits = [s for s in (1, 2, 4, 8) if 90 <= programs * s <= 520 and inputs // s >= 1024]
    return fits or [1]


def fp8_cuts(name: str, outputs: int, inputs: int, rows: int) -> Iterator[tuple[Shape, bool]]:
    """Cuts, and whether the copy engine fetches tiles."""
    if DEVICE.type == "cpu":
        cut = Shape(64, 128, 1 if name == "gate_up" else 2)
        yield from ((cut, streams) for streams in (False, True))
        return
    if rows <= 16:
        tiles = [(64, 256, 4, 3), (64, 256, 4, 4), (64, 128, 4, 4), (64, 128, 4, 6),
                 (64, 512, 4, 3)]  # fmt: skip
        streamed = [(64, 256, 4, 4), (64, 128, 4, 6)]
    elif rows <= 64:
        tiles = [(64, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6)]
        streamed = [(64, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 8, 4)]
    else:
        tiles = [(64, 128, 4, 4), (128, 128, 8, 3)]
        streamed = [(64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 8, 3), (128, 128, 8, 4)]
    for streams, (n, k, warps, stages) in itertools.chain(
        ((False, cut) for cut in tiles), ((True, cut) for cut in streamed)
    ):
        for splits in splits_of(name, outputs, inputs, n, rows):
            yield Shape(n, k, splits, warps, stages), streams


def int4_cuts(name: str, outputs: int, inputs: int, rows: int) -> Iterator[Shape]:
    if DEVICE.type == "cpu":
        yield Shape(64, 256, 1)
        return
    if rows <= 16:
        tiles = [(64, 256, 4, 4), (64, 256, 4, 6), (64, 512, 4, 3), (64, 512, 4, 4),
                 (128, 256, 8, 4)]  # fmt: skip
    else:
        tiles = [(64, 256, 4, 3), (64, 256, 4, 4), (128, 256, 8, 3), (64, 256, 8, 3)]
    for n, k, warps, stages in tiles:
        for splits in splits_of(name, outputs, inputs, n, rows):
            yield Shape(n, k, splits, warps, stages)


def cut_name(cut: Shape) -> str:
    return f"{cut.outputs}x{cut.inputs} s{cut.splits} w{cut.warps} d{cut.stages}"


def noise_of(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    return zeros.float(), zeros, zeros


def engine_way(name: str, x: Tensor) -> Way:
    kernels = Kernels()
    if name == "gate_up":
        return "engine", lambda layer: kernels.gated(x, layer)
    if name == "lm_head":
        return "engine", lambda layer: kernels.choose(x, layer, *noise_of(len(x)))
    return "engine", lambda layer: kernels.product(x, layer)


def fp8_ways(name: str, rows: Fp8Rows, cut: Shape, *, streams: bool) -> Iterator[Way]:
    label = f"r{rows.group} {cut_name(cut)}{' tma' if streams else ''}"
    if name == "gate_up":
        yield (
            f"fused {label}",
            lambda w: gated_fp8(rows, w[0], w[1], cut, streams=streams, dtype=DTYPE),
        )
        yield (
            f"then silu {label}",
            lambda w: silu_fp8(partial_fp8(rows, w[0], w[1], cut, streams=streams)),
        )
    elif name == "lm_head":
        noise = noise_of(rows.shape[0])
        yield label, lambda w: choose_fp8(rows, w[0], w[1], *noise, None, cut, streams=streams)
    else:
        yield label, lambda w: partial_fp8(rows, w[0], w[1], cut, streams=streams)


def int4_ways(name: str, rows: IntegerRows, cut: Shape) -> Iterator[Way]:
    label = cut_name(cut)
    if name == "gate_up":
        yield f"then silu {label}", lambda w: silu_integers(partial_groups(rows, w, cut))
    elif name == "lm_head":
        noise = noise_of(rows.shape[0])
        yield label, lambda w: choose_groups(rows, w, *noise, None, cut)
    else:
        yield label, lambda w: partial_groups(rows, w, cut)


def fp8_library(name: str, rows: Fp8Rows) -> Iterator[Way]:
    """By torch, which tells the recipe from the scales; a choice is not included."""

    def product(weight: Fp8Weight) -> Tensor:
        found = library_fp8(rows, weight[0], library_scales(weight[1]), torch.bfloat16)
        return silu_product(found) if name == "gate_up" else found

    yield f"torch._scaled_mm r{rows.group}", product


def int4_library(name: str, x: Tensor) -> Way:
    def product(weight: PackedGroups) -> Tensor:
        return torch.mm(x, dequantized_groups(weight, x.dtype).t())

    if name == "gate_up":
        return "to bf16, torch.mm, SiLU", lambda w: silu_product(product(w))
    return "to bf16, torch.mm", product
