"""Layers of experts to be timed, and rows for them; for gpu_moe.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from graph_timing import DEVICE, L2_BYTES
from torch import Tensor

from headstart.backends.cuda.experts import moe_terms, routing_of
from headstart.backends.cuda.kernels.group_experts import GroupExperts
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe import ExpertWeights, expert_terms
from headstart.backends.cuda.kernels.moe_fp8 import fp8_terms
from headstart.backends.cuda.kernels.moe_fp8_vector import fp8_vector_terms
from headstart.backends.cuda.kernels.moe_fp8_weights import Fp8Experts
from headstart.backends.cuda.kernels.moe_groups import group_terms
from headstart.backends.cuda.kernels.moe_vector import vector_terms
from headstart.backends.cuda.kernels.routing import choose_experts
from headstart.backends.cuda.quantized import hold_for_kernels
from headstart.backends.cuda.quantized_experts import HeldExperts, experts_of, hold_experts
from headstart.checkpoint.quantized.weights import (
    FP8_BLOCK,
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
    fp8_rows,
    pack_nibbles,
)
from headstart.models.feed_forward import MoE
from headstart.models.linear import Linear, Stack
from headstart.models.moe_config import MoeConfig
from headstart.models.quantized import quantized_module

FLOPS = 7.9e14  # of bf16 on an H200, as a library's largest products have them
# The interpreter multiplies bits of bf16 as if they were integers.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Layer:
    hidden: int
    config: MoeConfig


def _config(**sizes: Any) -> MoeConfig:
    usual = {"shared_gate": False, "correction": False, "num_groups": 1, "top_groups": 1,
             "renormalise": True, "least_sum": 1e-20, "scale": 1.0}  # fmt: skip
    return MoeConfig(**{**usual, **sizes})


LAYERS = {
    "qwen3-next": Layer(2048, _config(
        num_experts=512, top_k=10, width=512, shared_width=512, shared_gate=True, scoring="softmax",
    )),
    "glm-4.5-air": Layer(4096, _config(
        num_experts=128, top_k=8, width=1408, shared_width=1408, scoring="sigmoid", correction=True,
    )),
    "ernie-4.5-21b": Layer(2560, _config(
        num_experts=64, top_k=6, width=1536, shared_width=3072, scoring="softmax", correction=True,
    )),
    "qwen3.5-35b": Layer(2048, _config(
        num_experts=256, top_k=8, width=512, shared_width=512, shared_gate=True, scoring="softmax",
    )),
    "deepseek-v3": Layer(7168, _config(
        num_experts=256, top_k=8, width=2048, shared_width=2048, scoring="sigmoid", correction=True,
        num_groups=8, top_groups=4, scale=2.5,
    )),
    "tiny": Layer(128, _config(  # to see that everything runs
        num_experts=4, top_k=2, width=128, shared_width=128, scoring="softmax",
    )),
}  # fmt: skip


def make(layer: Layer) -> MoE:
    with DEVICE:
        block = MoE(layer.config, layer.hidden)
    block = block.to(DTYPE)
    for value in [*block.parameters(), *block.buffers()]:
        value.data.normal_(0, layer.hidden**-0.5)
    return block


CUTS = [
    Shape(outputs=n, inputs=k, warps=w, stages=s)
    for n, k, w, s in itertools.product((16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (2, 3, 4, 5))
    if 2048 <= n * k <= 128 * 128
]
FP8_CUTS = [
    Shape(outputs=n, inputs=k, warps=w, stages=s)
    for n, k, w, s in itertools.product((64, 128), (128, 256), (4, 8), (2, 3, 4, 5, 6))
]
GROUP_CUTS = [
    Shape(outputs=n, inputs=k, warps=w, stages=s)
    for n, k, w, s in itertools.product((64, 128), (256, 512), (4, 8), (2, 3, 4, 5))
]
VECTOR_CUTS = [
    Shape(outputs=n, inputs=4096 // n // part, warps=w)
    for n, part, w in itertools.product((2, 4, 8), (1, 2, 4), (1, 2, 4))
]
FP8_VECTOR_CUTS = [
    Shape(outputs=n, inputs=k, warps=w)
    for n, k, w in itertools.product((2, 4, 8), (256, 512, 1024), (1, 2, 4))
]
# By how experts are held: with tiles, the cuts to be tried; and without, where they can do without.
BY_TILES: dict[type, tuple[Callable[..., Tensor], list[Shape]]] = {
    ExpertWeights: (expert_terms, CUTS), Fp8Experts: (fp8_terms, FP8_CUTS),
    GroupExperts: (group_terms, GROUP_CUTS),
}  # fmt: skip
ALONE: dict[type, tuple[Callable[..., Tensor], list[Shape]]] = {
    ExpertWeights: (vector_terms, VECTOR_CUTS), Fp8Experts: (fp8_vector_terms, FP8_VECTOR_CUTS),
}  # fmt: skip
# Of the plain module's norm: what rounding weights and rows to a format may change.
# Twice as much where the interpreter cuts bits off instead of rounding to e4m3.
TOLERANCE = {"as-dtype": 0.02, "fp8-row": 0.08, "fp8-block": 0.08, "int4-group": 0.25}
if DEVICE.type == "cpu":
    TOLERANCE |= {"fp8-row": 0.16, "fp8-block": 0.16}


def check(plain: MoE, block: MoE, layer: Layer, rows: int, name: str) -> float:
    """How far the layer is from the plain module, in parts of the result's norm."""
    x = torch.randn(rows, layer.hidden, device=DEVICE, dtype=DTYPE)
    found, wanted = moe_terms(x, block, None).float().sum(0), plain(x).float()
    error = float((found - wanted).norm() / wanted.norm())
    if not error < TOLERANCE[name]:
        raise SystemExit(f"{name}: {rows} rows differ from the plain module by {error:.3f}")
    return error


def fp8_blocks(values: Tensor) -> Fp8Weight:
    """A matrix whose sizes are multiples of 128."""
    rows, columns = (size // FP8_BLOCK for size in values.shape)
    parts = values.float().view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = parts.abs().amax((1, 3)) / 448
    codes = (parts / scales[:, None, :, None]).view_as(values).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, scales)


def int4_groups(values: Tensor) -> GroupWeight:
    """4 bits in groups of 128, symmetric; scales in the type that people store them in."""
    groups = values.float().view(len(values), -1, 128)
    scales = (groups.abs().amax(2) / 7).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return GroupWeight(4, pack_nibbles(codes.view_as(values).byte()), scales)


ROUND: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "fp8-row": fp8_rows, "fp8-block": fp8_blocks, "int4-group": int4_groups,
}  # fmt: skip
FORMATS = ("as-dtype", *ROUND)


def in_format(block: MoE, name: str) -> MoE:
    """The same layer with its experts, shared ones included, as such a checkpoint stores them."""
    if name == "as-dtype":
        return block
    result = MoE(block.router.config, 0)
    result.router, result.shared_gate = block.router, block.shared_gate
    for source, target in ((block.experts, result.experts), (block.shared, result.shared)):
        if source is None or target is None:
            continue
        for part in ("gate_up", "down"):
            setattr(target, part, _rounded(getattr(source, part), name))
    hold_experts(result)
    hold_for_kernels(result)
    return result


def _rounded(source: Linear | Stack, name: str) -> Linear | Stack:
    weight = source.weight.data
    if weight.dim() == 2:
        return quantized_module(ROUND[name](weight), None, DTYPE)
    made: QuantizedWeight | None = None
    for expert, matrix in enumerate(weight):  # all of them at once would be too much in fp32
        own = ROUND[name](matrix).tensors
        if made is None:
            stacks = {
                key: part.new_empty(len(weight), *part.shape)
                for key, part in own.items() if part is not None
            }  # fmt: skip
            made = GroupWeight(4, **stacks) if "int4" in name else Fp8Weight(**stacks)
        for key, part in own.items():
            if part is not None:
                stacks[key][expert] = part
    assert made is not None
    return quantized_module(made, None, DTYPE)


def needed_bytes(block: MoE, layer: Layer, x: Tensor) -> tuple[int, int]:
    """What must be read for rows x, and how many experts they touch."""
    touched = int(block.router(x)[0].unique().numel())
    config, each = layer.config, experts_of(block).expert_bytes
    shared = each * config.shared_width // config.width
    return touched * each + shared + block.router.weight.numel() * 4, touched


def floor_of(layer: Layer, rows: int, read: float, speed: float) -> float:
    """Seconds for `read` bytes, or for the products of so many rows, whichever is more."""
    config = layer.config
    width = config.top_k * config.width + config.shared_width
    products = 2 * rows * layer.hidden * (3 * width + config.num_experts)
    return max(read / speed, products / FLOPS)


def batches(block: MoE, layer: Layer, rows: int) -> list[Tensor]:
    """Rows that touch more than the cache holds, several times over."""
    first = torch.randn(rows, layer.hidden, device=DEVICE, dtype=DTYPE)
    count = 2
    if DEVICE.type == "cuda":
        count = max(4, -(-4 * L2_BYTES // needed_bytes(block, layer, first)[0]))
    return [first, *(torch.randn_like(first) for _ in range(count - 1))]


def weights_of(block: MoE) -> HeldExperts:
    assert block.shared is not None
    found = experts_of(block)
    assert found.num_shared, "the shared experts go with the others"
    return found


Chosen = tuple[Tensor, Tensor, Tensor]  # rows, their experts, the weights of those


def chosen_by(block: MoE, all_x: list[Tensor]) -> list[Chosen]:
    routing = routing_of(block, weights_of(block).num_shared)
    result = []
    for x in all_x:
        logits = (x.float() @ block.router.weight.t())[None]
        result.append((x, *choose_experts(logits, routing, block.router.correction)))
    return result
