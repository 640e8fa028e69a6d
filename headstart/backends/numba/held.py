"""Layers as kernels read them: of every step a row of numbers, and the arrays that it points at.

`steps_of` has one entry for each kind of module; what a kind's numbers mean is said in the file
with its kernel. A kind is compiled when the first step of it is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from headstart.backends.numba import attention, delta, experts, latent, mlp
from headstart.backends.numba.calls import FIELDS, OUTPUTS, WIDTH
from headstart.backends.numba.linear import Packed
from headstart.backends.numba.packing import PackedLatent, PackedRouter
from headstart.backends.numba.vectors import LANES
from headstart.backends.weights import SplitStack
from headstart.models.feed_forward import MLP, MoE
from headstart.models.grouped_attention import Attention
from headstart.models.layers import DecoderLayer
from headstart.models.linear_attention import DeltaNet
from headstart.models.mla import LatentAttention
from headstart.models.moe_config import Limit
from headstart.models.norm import Norm
from headstart.models.rope import RotaryTable

STEP = 40  # int64 of a step
Array = np.ndarray | torch.Tensor | nn.Module | None


@dataclass(frozen=True)
class Memory:
    """What a layer may keep of texts, and how far its rows see."""

    slots: int  # of K/V
    states: int  # slots of recurrent states
    rotary: RotaryTable
    window: int | None = None


@dataclass(frozen=True)
class HeldStep:
    """A step of a layer."""

    fields: list[int]
    arrays: tuple[Array, ...]  # that the fields point at
    weights: int  # that a row is multiplied with
    phases: Callable[[int], int]  # that it takes, by number of rows
    floats: Callable[[int], int]  # of scratch

    @property
    def row(self) -> np.ndarray:
        return np.array(self.fields + [0] * (STEP - len(self.fields)), np.int64)


def steps_of(layer: DecoderLayer, memory: Memory) -> list[HeldStep]:
    """What a layer does to the residual stream, in order."""
    mixer, feed = layer.attention, layer.mlp
    if isinstance(mixer, Attention):
        first = _attention(layer.attention_norm, mixer, memory)
    elif isinstance(mixer, DeltaNet):
        first = _delta(layer.attention_norm, mixer, memory.states)
    else:
        assert isinstance(mixer, LatentAttention), "others are refused"
        first = _latent(layer.attention_norm, mixer, memory)
    if isinstance(feed, MLP):
        return [first, _mlp(layer.mlp_norm, feed)]
    assert isinstance(feed, MoE), "others are refused"
    return [first, _experts(layer.mlp_norm, feed)]


def bits(value: float) -> int:
    """A float32 as kernels find it in a field."""
    return int(np.float32(value).view(np.int32))


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def matrix_rows(modules: Sequence[nn.Module]) -> np.ndarray:
    """Matrices as kernels read them [n, FIELDS], while the modules live."""
    rows = np.empty((len(modules), FIELDS), np.int64)
    for module, row in zip(modules, rows, strict=True):
        packed(module).describe(row)
    return rows


def packed(module: nn.Module) -> Packed:
    assert isinstance(module, Packed), "all products are packed"
    return module


def num_weights(rows: np.ndarray) -> int:
    return int((rows[:, OUTPUTS] * rows[:, WIDTH]).sum())


def _attention(norm: Norm, module: Attention, memory: Memory) -> HeldStep:
    products = matrix_rows([module.qkv, module.o])
    gate = None if module.head_gate is None else matrix_rows([module.head_gate])
    shape = (module.kv_heads, module.dim, module.v_dim)
    keys, values = _kv_memory(memory.slots, *shape)
    factors = [None if each is None else each.factor for each in (module.q_norm, module.k_norm)]
    heads, dim, v_dim, rotary = module.heads, module.dim, module.v_dim, memory.rotary
    qkv = int(products[0, OUTPUTS])
    fields = [
        attention.attention.address, norm.factor.data_ptr(), bits(norm.eps),
        products[0].ctypes.data, products[1].ctypes.data, heads, *shape, *map(address, factors),
        address(rotary.cos), address(rotary.sin), rotary.cos.shape[1], int(rotary.is_interleaved),
        bits(dim**-0.5), bits(module.v_scale), keys.ctypes.data, values.ctypes.data, memory.slots,
        memory.window or 0, address(module.sinks), int(module.is_gated),
        0 if gate is None else gate.ctypes.data,
    ]  # fmt: skip
    return HeldStep(
        fields, (norm, module, products, gate, keys, values, *factors, rotary),
        num_weights(products), lambda rows: attention.PHASES,
        lambda rows: rows * (qkv + heads * (dim + v_dim + 1)),
    )  # fmt: skip


def _kv_memory(slots: int, heads: int, dim: int, v_dim: int) -> tuple[np.ndarray, np.ndarray]:
    keys = np.zeros((-(-slots // LANES), heads, dim, LANES), np.float32)
    return keys, np.zeros((slots, heads, -(-v_dim // LANES) * LANES), np.float32)


def _latent(norm: Norm, module: LatentAttention, memory: Memory) -> HeldStep:
    config, heads, rotary = module.config, module.heads, memory.rotary
    ups = module.kv_up
    assert isinstance(ups, PackedLatent)
    products = matrix_rows([module.compress, module.o])
    q_up = None if module.q_up is None else matrix_rows([module.q_up])
    lift, lower = matrix_rows(list(ups.lift)), matrix_rows(list(ups.lower))
    keys, values = _kv_memory(memory.slots, 1, config.entry, config.kv_rank)
    kv_norm = module.kv_latent_norm.factor
    q_norm = None if module.q_latent_norm is None else module.q_latent_norm.factor
    fields = [
        latent.latent_attention.address, norm.factor.data_ptr(), bits(norm.eps),
        products[0].ctypes.data, products[1].ctypes.data, heads, 1, config.entry, config.kv_rank,
        0, 0, address(rotary.cos), address(rotary.sin), rotary.cos.shape[1],
        int(rotary.is_interleaved), bits(config.scale), bits(1.0), keys.ctypes.data,
        values.ctypes.data, memory.slots, 0, address(module.sinks), 0, 0,
        address(kv_norm), address(q_norm), bits(config.eps),
        0 if q_up is None else q_up.ctypes.data, lift.ctypes.data, lower.ctypes.data,
        config.nope_dim, config.rope_dim, config.v_dim,
    ]  # fmt: skip
    found = np.concatenate([products, lift, lower, *([] if q_up is None else [q_up])])
    return HeldStep(
        fields, (norm, module, products, q_up, lift, lower, keys, values, kv_norm, q_norm, rotary),
        num_weights(found), lambda rows: latent.num_phases(heads),
        partial(
            latent.num_floats, wide=int(products[0, OUTPUTS]), heads=heads, q_dim=config.qk_dim,
            rank=config.kv_rank, entry=config.entry, v=config.v_dim,
        ),
    )  # fmt: skip


def _delta(norm: Norm, module: DeltaNet, states: int) -> HeldStep:
    config = module.config
    products = matrix_rows([module.inputs, module.out])
    taps = module.conv.detach().squeeze(1).float().t().contiguous()
    conv = np.zeros((states, config.kernel - 1, config.channels), np.float32)
    memories = np.zeros((states, config.v_heads, config.k_dim, config.v_dim), np.float32)
    wide = int(products[0, OUTPUTS])
    fields = [
        delta.delta_net.address, norm.factor.data_ptr(), bits(norm.eps), products[0].ctypes.data,
        products[1].ctypes.data, config.k_heads, config.v_heads, config.k_dim, config.v_dim,
        config.kernel, address(taps), address(module.a_log), address(module.dt_bias),
        address(module.norm), conv.ctypes.data, memories.ctypes.data, states,
        int(config.gate == "sigmoid"),
    ]  # fmt: skip
    return HeldStep(
        fields, (norm, module, products, taps, conv, memories), num_weights(products),
        lambda rows: delta.PHASES,
        lambda rows: rows * (wide + config.channels + config.values),
    )  # fmt: skip


def _limit(limit: Limit | None) -> list[int]:
    return [0, 0] if limit is None else [bits(limit.most), int(limit.is_before)]


def _mlp(norm: Norm, module: MLP) -> HeldStep:
    products = matrix_rows([module.gate_up, module.down])
    fields = [
        mlp.mlp.address, norm.factor.data_ptr(), bits(norm.eps), products[0].ctypes.data,
        products[1].ctypes.data, *_limit(module.limit),
    ]  # fmt: skip
    width = int(products[0, OUTPUTS])
    return HeldStep(
        fields, (norm, module, products), num_weights(products), lambda rows: mlp.PHASES,
        lambda rows: rows * width,
    )  # fmt: skip


def _stack_rows(stack: nn.Module) -> np.ndarray:
    assert isinstance(stack, SplitStack), "all products are packed"
    return matrix_rows(list(stack.parts))


def _experts(norm: Norm, module: MoE) -> HeldStep:
    router, config = module.router, module.router.config
    assert isinstance(router, PackedRouter)
    first, second = map(_stack_rows, (module.experts.gate_up, module.experts.down))
    shared = None
    if module.shared is not None:
        shared = matrix_rows([module.shared.gate_up, module.shared.down])
    product = matrix_rows([router.product])
    gate = None if module.shared_gate is None else matrix_rows([module.shared_gate])
    limit = None if module.shared is None else module.shared.limit
    fields = [
        experts.experts.address, norm.factor.data_ptr(), bits(norm.eps), product.ctypes.data,
        address(router.correction), config.num_experts, config.top_k,
        int(config.scoring == "sigmoid"), config.num_groups, config.top_groups,
        int(config.renormalise), bits(config.least_sum), bits(config.scale), first.ctypes.data,
        second.ctypes.data, *_limit(module.experts.limit),
        *([0, 0] if shared is None else [shared[0].ctypes.data, shared[1].ctypes.data]),
        0 if gate is None else gate.ctypes.data, *_limit(limit),
    ]  # fmt: skip
    each = num_weights(first[:1]) + num_weights(second[:1])
    rest = num_weights(np.concatenate([product, *([] if shared is None else [shared])]))
    sizes = (config.top_k, config.num_experts)
    widths = (int(first[0, OUTPUTS]), 0 if shared is None else int(shared[0, OUTPUTS]))
    hidden = int(second[0, OUTPUTS])
    return HeldStep(
        fields, (norm, module, first, second, shared, product, gate),
        config.top_k * each + rest, lambda rows: experts.num_phases(rows, *sizes),
        lambda rows: experts.num_floats(rows, *sizes, *widths, hidden),
    )  # fmt: skip
