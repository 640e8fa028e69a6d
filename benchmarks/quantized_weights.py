"""Weights and rows of products in each format, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graph_timing import DEVICE, L2_BYTES
from torch import Tensor
from torch.nn.functional import silu

from headstart.backends.cuda.kernels.eight_bits import (
    GROUP,
    Fp8Rows,
    IntegerRows,
)
from headstart.backends.cuda.kernels.fp8_tiles import BLOCK
from headstart.backends.cuda.kernels.group_packing import (
    PackedGroups,
    packed_groups,
)
from headstart.models.linear import Linear

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008),
    "lm_head": (151680, 4096), "tiny": (256, 256),
}  # fmt: skip
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
Fp8Weight = tuple[Tensor, Tensor]


def plain_weight(outputs: int, inputs: int) -> Linear:
    layer = Linear(0, 0)
    # Rows of different sizes, so that a scale in the wrong place shows.
    sizes = torch.logspace(-1, 0, outputs, device=DEVICE, dtype=DTYPE)
    values = torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE)
    layer.weight = torch.nn.Parameter(values.mul_(sizes[:, None]), requires_grad=False)
    return layer


def fp8_values(outputs: int, inputs: int) -> Tensor:
    # Seven times the mean size is still a number of the format.
    return torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE).mul_(60).to(torch.float8_e4m3fn)


def row_weight(outputs: int, inputs: int) -> Fp8Weight:
    return fp8_values(outputs, inputs), torch.logspace(-3, -2, outputs, device=DEVICE)


def block_weight(outputs: int, inputs: int) -> Fp8Weight:
    scales = torch.rand(-(-outputs // BLOCK), -(-inputs // BLOCK), device=DEVICE)
    return fp8_values(outputs, inputs), (0.5 + scales) / 100


def int4_weight(outputs: int, inputs: int) -> PackedGroups:
    codes = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
    scales = (0.5 + torch.rand(outputs, inputs // GROUP, device=DEVICE)) / 10
    return packed_groups(codes, scales.to(torch.bfloat16), None, 4)


WEIGHTS: dict[str, Callable[[int, int], Any]] = {
    "bf16": plain_weight, "row": row_weight, "block": block_weight, "int4": int4_weight,
}  # fmt: skip
NUM_BYTES = {"bf16": 2.0, "row": 1.0, "block": 1.0, "int4": 0.5 + 2 / GROUP}


def copies_of(form: str, outputs: int, inputs: int) -> list[Any]:
    size = outputs * inputs * NUM_BYTES[form]
    count = max(2, -(-L2_BYTES // int(size))) if DEVICE.type == "cuda" else 1
    return [WEIGHTS[form](outputs, inputs) for _ in range(count)]


def dense(weight: Any) -> Tensor:
    """W in fp32."""
    if isinstance(weight, Linear):
        return weight.weight.float()
    if isinstance(weight, PackedGroups):
        low, high = (weight.weight << 4) >> 4, weight.weight >> 4  # with their signs
        halves = [part.view(len(part), -1, 1, weight.half) for part in (low, high)]
        codes = torch.cat(halves, 2).flatten(1).float()
        return codes.mul_(weight.scales.t().float().repeat_interleave(weight.group, 1))
    values: Tensor = weight[0]
    scales: Tensor = weight[1]
    if scales.dim() == 1:
        return values.float() * scales[:, None]
    wide = scales.repeat_interleave(BLOCK, 0)[: values.shape[0]]
    return values.float() * wide.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def dense_rows(rows: Tensor | Fp8Rows | IntegerRows) -> Tensor:
    """What rounded rows stand for."""
    if isinstance(rows, Tensor):
        return rows.float()
    values = rows.values.float()
    group = rows.group or values.shape[1]
    values = values * rows.scales.repeat_interleave(group, 0)[: values.shape[1]].t()
    return values[::2] + values[1::2] if isinstance(rows, IntegerRows) else values


def error_of(name: str, wanted: Tensor, found: Any) -> float:
    """Relative to the size of what is wanted (LM head: of the best logit)."""
    if name == "lm_head":
        chosen = wanted.gather(1, found[:, None]).squeeze(1)
        return float((1 - chosen / wanted.amax(1)).max())
    if name == "gate_up":
        gate, up = wanted.chunk(2, -1)
        wanted = silu(gate) * up
    if isinstance(found, Tensor):
        found = found.float().sum(0) if found.dim() == 3 else found.float()
    else:
        found = dense_rows(found)
    return float((found - wanted).norm() / wanted.norm())
