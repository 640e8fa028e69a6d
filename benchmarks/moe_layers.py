"""Layers of experts to be timed, and rows for them; for gpu_moe.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from graph_timing import DEVICE, L2_BYTES
from torch import Tensor

from headstart.backends.cuda.experts import routing_of
from headstart.backends.cuda.kernels.moe import ExpertWeights
from headstart.backends.cuda.kernels.routing import choose_experts
from headstart.models.feed_forward import MoE
from headstart.models.moe_config import MoeConfig

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
    "tiny": Layer(32, _config(  # to see that everything runs
        num_experts=4, top_k=2, width=16, shared_width=16, scoring="softmax",
    )),
}  # fmt: skip


def make(layer: Layer) -> MoE:
    with DEVICE:
        block = MoE(layer.config, layer.hidden)
    block = block.to(DTYPE)
    for value in [*block.parameters(), *block.buffers()]:
        value.data.normal_(0, layer.hidden**-0.5)
    return block


def needed_bytes(block: MoE, layer: Layer, x: Tensor) -> tuple[int, int]:
    """What must be read for rows x, and how many experts they touch."""
    touched = int(block.router(x)[0].unique().numel())
    config = layer.config
    experts = touched * 3 * config.width * layer.hidden * DTYPE.itemsize
    shared = 3 * config.shared_width * layer.hidden * DTYPE.itemsize
    return experts + shared + block.router.weight.numel() * 4, touched


def batches(block: MoE, layer: Layer, rows: int) -> list[Tensor]:
    """Rows that touch more than the cache holds, several times over."""
    first = torch.randn(rows, layer.hidden, device=DEVICE, dtype=DTYPE)
    count = 2
    if DEVICE.type == "cuda":
        count = max(4, -(-4 * L2_BYTES // needed_bytes(block, layer, first)[0]))
    return [first, *(torch.randn_like(first) for _ in range(count - 1))]


def weights_of(block: MoE) -> ExpertWeights:
    assert block.shared is not None
    return ExpertWeights(
        block.experts.gate_up.weight, block.experts.down.weight, block.shared.gate_up.weight,
        block.shared.down.weight,
    )  # fmt: skip


Chosen = tuple[Tensor, Tensor, Tensor]  # rows, their experts, the weights of those


def chosen_by(block: MoE, all_x: list[Tensor]) -> list[Chosen]:
    routing = routing_of(block, weights_of(block).num_shared)
    result = []
    for x in all_x:
        logits = (x.float() @ block.router.weight.t())[None]
        result.append((x, *choose_experts(logits, routing, block.router.correction)))
    return result
