"""The head against a straight-line reference: whole sequences, no cache, one module at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.long_runs import unless_long
from support.model_reference import SMALL, hand_made, our_trunk, randomised, transformers_model
from torch import Tensor

from headstart.backends.base import BackendOptions, CacheSizes, StateRows, TrunkRows
from headstart.backends.torch.backend import TorchBackend
from headstart.engine.drafter import Drafter
from headstart.engine.request import Request
from headstart.errors import UnsupportedFamily
from headstart.families.base import HeadLayout
from headstart.families.registry import family
from headstart.models.attention_config import AttentionShape
from headstart.models.config import LayerKind
from headstart.models.config_reader import model_config
from headstart.models.linear_attention import DeltaNet
from headstart.models.mamba import Mamba
from headstart.models.mla import LatentAttention
from headstart.models.mtp import MTPHead, MTPModule
from headstart.models.rope import RopeConfig, RotaryTable
from headstart.models.trunk import Trunk
from headstart.sampling.params import SamplingParams

_HYBRID: dict[str, Any] = {
    "head_dim": 16, "partial_rotary_factor": 0.25, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.5,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 3,
        "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
    },
    "qwen3_next": {
        **_HYBRID, "model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    },
    "qwen3_5_text": {**_HYBRID, "model_type": "qwen3_5_text"},
    "deepseek_v3": {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 20,
        "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12,
        "head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
    },
    **{
        kind: {
            "model_type": kind, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16,
            "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "head_dim": 6,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "index_n_heads": 3,
            "index_head_dim": 10, "index_topk": 4,
        }
        for kind in ("deepseek_v32", "glm_moe_dsa")
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash", "head_dim": 12, "v_head_dim": 6, "rope_theta": 5e6,
        "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5, "attention_value_scale": 0.7,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 12,
        "swa_v_head_dim": 6, "swa_rope_theta": 10000.0, "sliding_window_size": 3,
        "add_swa_attention_sink_bias": True, "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1], "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "hybrid_override_pattern": "ME", "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_latent_size": 12,
        "moe_shared_expert_intermediate_size": 20, "mamba_num_heads": 4, "mamba_head_dim": 5,
        "n_groups": 2, "ssm_state_size": 6, "routed_scaling_factor": 1.5,
    },
    "bailing_moe_v3": {
        "model_type": "bailing_moe_v3", "layer_group_size": 1, "kv_lora_rank": 16,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "exaone_moe": {
        "model_type": "exaone_moe", "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "mtp_layer_types": ["full_attention"],
    },
    "exaone4_5_text": {
        "model_type": "exaone4_5_text", "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    "mellum": {
        "model_type": "mellum", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "step3p5": {
        "model_type": "step3p5", "use_head_wise_attn_gate": True, "sliding_window": 4,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2,
                                    "head_dim": 8},
        "layer_types": ["full_attention"] + ["sliding_attention"] * 4, "moe_layers_enum": "1",
        "moe_num_experts": 8, "moe_top_k": 3, "moe_intermediate_size": 24,
        "share_expert_dim": 20, "rope_theta": [5e6, 1e4, 1e4, 1e4, 1e4],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0],
    },
}  # fmt: skip
LAYOUTS: dict[str, tuple[HeadLayout, int]] = {
    "one module, embed first": (HeadLayout(), 1),
    "one module, hidden first": (HeadLayout(fuse_order="hidden_first"), 1),
    "one module, position 0 zeroed": (HeadLayout(zero_embed_at_position_0=True), 1),
    "one module, before the final norm": (HeadLayout(trunk_hidden="before_final_norm"), 1),
    "one module, recycled before its norm": (HeadLayout(recycled_hidden="before_out_norm"), 1),
    "one module, no norm": (HeadLayout(out_norm="none"), 1),
    "two chained": (HeadLayout(topology="chained"), 2),
    "three chained, hidden first": (HeadLayout(topology="chained", fuse_order="hidden_first"), 3),
    "three chained, position 0 zeroed, before the norm": (
        HeadLayout(
            topology="chained", zero_embed_at_position_0=True, recycled_hidden="before_out_norm"
        ),
        3,
    ),
    "two parallel": (HeadLayout(topology="parallel", fuse_order="hidden_first"), 2),
    "three parallel, position 0 zeroed": (
        HeadLayout(topology="parallel", zero_embed_at_position_0=True),
        3,
    ),
}
NUM_DRAFTS = 5


class Straight:
    """Drafts from all tokens at once, with the formulas written out."""

    def __init__(self, trunk: Trunk, head: MTPHead):
        self.trunk, self.head, self.layout = trunk, head, head.layout

    def trunk_states(self, ids: list[int]) -> Tensor:
        x = self.trunk.embed[ids]
        for layer, kind in zip(self.trunk.layers, self.trunk.config.layers, strict=True):
            x = self._layer(layer, kind, x)
        if self.layout.trunk_hidden == "before_final_norm":
            return x
        return _rms(x, self.trunk.final_norm)

    def drafts(self, ids: list[int]) -> tuple[list[int], list[Tensor]]:
        """Greedy drafts after `ids`, whose last token the trunk has not read yet."""
        newest = len(ids) - 1
        trunk_states = self.trunk_states(ids[:newest])
        known, logits = list(ids), []
        count, feed = self.head.num_modules, trunk_states
        for depth in range(1, NUM_DRAFTS + 1):
            number = min(depth, count) - 1
            module = self.head.modules_[number]
            if depth <= count:
                tokens = known[number + 1 :]
                inputs = trunk_states if self.layout.topology == "parallel" else feed
            else:
                tokens, inputs = known[count:], torch.cat([inputs, feed[-1:]])
            normed, feed = self._module(module, tokens, inputs)
            lm_head = self.trunk.lm_head if module.lm_head is None else module.lm_head
            logits.append(normed[-1] @ lm_head.weight.T)
            known.append(int(logits[-1].argmax()))
        return known[len(ids) :], logits

    def _module(self, module: Any, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        assert len(tokens) == len(states)
        embedded = self.trunk.embed[tokens].clone()
        if self.layout.zero_embed_at_position_0:
            embedded[0] = 0
        token, state = _rms(embedded, module.embed_norm), _rms(states, module.hidden_norm)
        weight = module.fuse.weight
        left, right = weight[:, : weight.shape[0]], weight[:, weight.shape[0] :]
        if self.layout.fuse_order == "embed_first":
            x = token @ left.T + state @ right.T
        else:
            x = state @ left.T + token @ right.T
        config = self.head.config
        x = self._layer(module.block, config.head_layer, x, config.rope_of_head)
        normed = x if module.out_norm is None else _rms(x, module.out_norm)
        return normed, normed if self.layout.recycled_hidden == "after_out_norm" else x

    def _layer(
        self, layer: Any, kind: LayerKind, x: Tensor, rope: RopeConfig | None = None
    ) -> Tensor:
        shape = self.trunk.config.shape(kind)
        shape = shape if rope is None else replace(shape, rope=rope)
        if kind.norms == "after":
            x = x + _rms(self._attention(layer.attention, x, shape), layer.attention_out_norm)
            return x + _rms(self._feed(layer.mlp, x), layer.mlp_out_norm)
        if kind.mixer != "none":
            x = x + self._attention(layer.attention, _rms(x, layer.attention_norm), shape)
        return x if kind.feed == "none" else x + self._feed(layer.mlp, _rms(x, layer.mlp_norm))

    def _feed(self, mlp: Any, x: Tensor) -> Tensor:
        if hasattr(mlp, "gate_up"):
            return _swiglu(x, mlp.gate_up.weight, mlp.down.weight)
        config, experts, result = self.trunk.config.moe, mlp.experts, []
        assert config is not None
        for row in x:  # one at a time, and one expert after another
            logits = mlp.router.weight @ row
            scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(-1)
            steered = scores if mlp.router.correction is None else scores + mlp.router.correction
            order = steered.argsort(descending=True)[: config.top_k]
            total = torch.zeros_like(row)
            if not self.trunk.config.gated_mlp:
                result.append(_ungated_experts(mlp, row, scores, order, config.scale))
                continue
            if mlp.shared is not None:
                total = _swiglu(row, mlp.shared.gate_up.weight, mlp.shared.down.weight)
            if mlp.shared_gate is not None:
                total = total * (mlp.shared_gate.weight @ row).sigmoid()
            whole = scores[order].sum() if config.renormalise else 1.0
            for number in order.tolist():
                said = _swiglu(row, experts.gate_up.weight[number], experts.down.weight[number])
                total = total + config.scale * scores[number] / whole * said
            result.append(total)
        return torch.stack(result)

    def _attention(self, attention: Any, x: Tensor, shape: AttentionShape) -> Tensor:
        if isinstance(attention, DeltaNet):
            return _delta_net(attention, x)
        if isinstance(attention, Mamba):
            return _mamba(attention, x)
        if isinstance(attention, LatentAttention):
            return _latent_attention(attention, x, self.trunk.config.rope)
        heads, kv, dim, rope = shape.heads, shape.kv_heads, shape.dim, shape.rope
        rows = x @ attention.qkv.weight.T
        if attention.qkv.bias is not None:
            rows = rows + attention.qkv.bias
        v = rows[:, len(rows[0]) - kv * shape.v_dim :].view(len(x), kv, shape.v_dim)
        v, rows = self.trunk.config.v_scale * v, rows[:, : len(rows[0]) - kv * shape.v_dim]
        gates = torch.ones(len(x), heads * shape.v_dim, dtype=x.dtype)
        if attention.is_gated:
            queries = rows[:, : 2 * heads * dim].view(len(x), heads, 2 * dim)
            gates = queries[..., dim:].reshape(len(x), -1).sigmoid()
            rows = torch.cat([queries[..., :dim].flatten(1), rows[:, 2 * heads * dim :]], dim=1)
        if attention.head_gate is not None:
            said = (x @ attention.head_gate.weight.T).sigmoid()
            gates = torch.cat([said[:, [head]].expand(-1, shape.v_dim) for head in range(heads)], 1)
        rows = rows.reshape(len(x), heads + kv, dim)
        q, k = rows[:, :heads], rows[:, heads:]
        if attention.q_norm is not None:
            q, k = _rms(q, attention.q_norm), _rms(k, attention.k_norm)
        out = torch.zeros(len(x), heads, shape.v_dim, dtype=x.dtype)
        for head in range(heads):
            of = head // (heads // kv)
            for row in range(len(x)):
                first = 0 if shape.window is None else max(0, row + 1 - shape.window)
                query = _turn(q[row, head], row, rope)
                keys = torch.stack([_turn(k[i, of], i, rope) for i in range(first, row + 1)])
                shares = (keys @ query / dim**0.5).exp()
                sunk = 0 if attention.sinks is None else attention.sinks[head].exp()
                out[row, head] = shares @ v[first : row + 1, of] / (shares.sum() + sunk)
        return (out.reshape(len(x), -1) * gates) @ attention.o.weight.T


def _latent_attention(mla: LatentAttention, x: Tensor, rope: RopeConfig) -> Tensor:
    """Head by head and row by row, every key and value written out."""
    sizes, count = mla.config, len(x)
    rows = sizes.q_rank or mla.heads * sizes.qk_dim
    q, latent, key = (x @ mla.compress.weight.T).split(
        [rows, sizes.kv_rank, sizes.rope_dim], dim=-1
    )
    q_latent = q
    if mla.q_up is not None:
        q_latent = _rms(q, mla.q_latent_norm)
        q = q_latent @ mla.q_up.weight.T
    q = q.view(count, mla.heads, sizes.qk_dim)
    key = torch.stack([_turn(key[t], t, rope) for t in range(count)])
    unfolded = (_rms(latent, mla.kv_latent_norm) @ mla.kv_up.T).view(count, mla.heads, -1)
    out = torch.zeros(count, mla.heads, sizes.v_dim, dtype=x.dtype)
    chosen = _chosen(mla, x, q_latent, rope)
    for head in range(mla.heads):
        keys = torch.cat([unfolded[:, head, : sizes.nope_dim], key], dim=-1)
        for t in range(count):
            turned = _turn(q[t, head, sizes.nope_dim :], t, rope)
            query = torch.cat([q[t, head, : sizes.nope_dim], turned])
            shares = (keys[chosen[t]] @ query * sizes.scale).softmax(-1)
            out[t, head] = shares @ unfolded[chosen[t], head, sizes.nope_dim :]
    if mla.gate is not None:  # one for each head
        gates = (x @ mla.gate.weight.T).sigmoid()
        out = torch.stack([out[:, head] * gates[:, [head]] for head in range(mla.heads)], dim=1)
    return out.flatten(1) @ mla.o.weight.T


def _chosen(mla: LatentAttention, x: Tensor, q_latent: Tensor, rope: RopeConfig) -> list[list[int]]:
    """The tokens that each row sees."""
    indexer = mla.indexer
    if indexer is None:
        return [list(range(t + 1)) for t in range(len(x))]
    sizes = indexer.config
    rope = replace(rope, is_interleaved=sizes.is_interleaved)
    keys = x @ indexer.k.weight.T
    keys = keys - keys.mean(-1, keepdim=True)
    keys = keys / (keys.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    keys = keys * indexer.k_norm_weight + indexer.k_norm_bias
    q = (q_latent @ indexer.q_up.weight.T).view(len(x), sizes.heads, sizes.dim)
    weights, result = x @ indexer.weights.weight.T, []
    for t in range(len(x)):
        scores = []
        for i in range(t + 1):
            key = _turn(keys[i], i, rope)
            dots = [_turn(q[t, h], t, rope) @ key for h in range(sizes.heads)]
            scores.append(
                float(sum(w * d.clamp(min=0) for w, d in zip(weights[t], dots, strict=True)))
            )
        result.append(sorted(range(t + 1), key=lambda i: -scores[i])[: sizes.top_k])
    return result


def _delta_net(net: DeltaNet, x: Tensor) -> Tensor:
    """Head by head and row by row, from the definition (`models/delta_rule.py`)."""
    sizes = net.config
    mixed, gate, b, a = (x @ net.inputs.weight.T).split(net.sizes, dim=-1)
    padded = torch.cat([torch.zeros(sizes.kernel - 1, sizes.channels, dtype=x.dtype), mixed])
    weight = net.conv.squeeze(1).T
    mixed = torch.stack([(padded[t : t + sizes.kernel] * weight).sum(0) for t in range(len(x))])
    mixed = mixed * mixed.sigmoid()
    keys = sizes.k_heads * sizes.k_dim
    out = torch.zeros(len(x), sizes.v_heads, sizes.v_dim, dtype=x.dtype)
    for head in range(sizes.v_heads):
        memory = torch.zeros(sizes.k_dim, sizes.v_dim, dtype=x.dtype)
        first = head // (sizes.v_heads // sizes.k_heads) * sizes.k_dim
        value = 2 * keys + head * sizes.v_dim
        for t, row in enumerate(mixed):
            q, k = row[first : first + sizes.k_dim], row[keys + first : keys + first + sizes.k_dim]
            q, k = (part / (part.square().sum() + 1e-6).sqrt() for part in (q, k))
            memory = (
                memory * (-net.a_log[head].exp() * (a[t] + net.dt_bias)[head].exp().log1p()).exp()
            )
            change = b[t, head].sigmoid() * (row[value : value + sizes.v_dim] - k @ memory)
            memory = memory + k[:, None] * change
            out[t, head] = q @ memory / sizes.k_dim**0.5
    normed = out / (out.square().mean(-1, keepdim=True) + net.eps).sqrt() * net.norm
    return (normed.flatten(1) * gate * gate.sigmoid()) @ net.out.weight.T


def _ungated_experts(moe: Any, row: Tensor, scores: Tensor, order: Tensor, scale: float) -> Tensor:
    """The experts' sum in their own space, brought out of it, and the shared one."""
    inner, total = moe.latent_in.weight @ row, torch.zeros_like(moe.latent_in.weight[:, 0])
    for number in order.tolist():
        above = (moe.experts.up.weight[number] @ inner).clamp(min=0)
        said = moe.experts.down.weight[number] @ (above * above)
        total = total + scale * scores[number] / scores[order].sum() * said
    above = (moe.shared.up.weight @ row).clamp(min=0)
    return moe.latent_out.weight @ total + moe.shared.down.weight @ (above * above)


def _mamba(net: Mamba, x: Tensor) -> Tensor:
    """Head by head and row by row, from the definition (`models/mamba.py`)."""
    sizes = net.config
    gate, mixed, steps = (x @ net.inputs.weight.T).split(net.sizes, dim=-1)
    padded = torch.cat([torch.zeros(sizes.kernel - 1, sizes.channels, dtype=x.dtype), mixed])
    weight = net.conv.squeeze(1).T
    mixed = torch.stack([(padded[t : t + sizes.kernel] * weight).sum(0) for t in range(len(x))])
    mixed = mixed + net.conv_bias
    mixed = mixed * mixed.sigmoid()
    groups = sizes.k_heads * sizes.k_dim
    out = torch.zeros(len(x), sizes.v_heads, sizes.v_dim, dtype=x.dtype)
    for head in range(sizes.v_heads):
        memory = torch.zeros(sizes.k_dim, sizes.v_dim, dtype=x.dtype)
        first = sizes.values + head // (sizes.v_heads // sizes.k_heads) * sizes.k_dim
        for t, row in enumerate(mixed):
            value = row[head * sizes.v_dim : (head + 1) * sizes.v_dim]
            b, c = row[first : first + sizes.k_dim], row[groups + first :][: sizes.k_dim]
            step = (steps[t] + net.dt_bias)[head].exp().log1p()
            memory = memory * (-net.a_log[head].exp() * step).exp() + b[:, None] * value * step
            out[t, head] = c @ memory + net.skip[head] * value
    gated = (out.flatten(1) * gate * gate.sigmoid()).view(len(x), sizes.k_heads, -1)
    normed = gated / (gated.square().mean(-1, keepdim=True) + net.eps).sqrt()
    return (normed.flatten(1) * net.norm) @ net.out.weight.T


def _rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.centred + norm.weight)


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up) @ down.T


def _turn(x: Tensor, position: int, rope: RopeConfig) -> Tensor:
    if not rope.dim:
        return x
    pairs, half = torch.arange(0, rope.dim, 2), rope.dim // 2
    # fp32 as published: see `frequencies`
    angle = position * (1 / rope.theta ** (pairs.float() / rope.dim)).double()
    places = (pairs, pairs + 1) if rope.is_interleaved else (pairs // 2, pairs // 2 + half)
    first, second = x[places[0]], x[places[1]]
    turned = x.clone()
    turned[places[0]] = first * angle.cos() - second * angle.sin()
    turned[places[1]] = second * angle.cos() + first * angle.sin()
    return turned


OWN_LAYOUTS = {
    "glm4_moe": family("glm4_moe").layout,
    "glm4_moe, as vllm": family("glm4_moe").layout.as_("vllm"),
    "ernie4_5_moe": family("ernie4_5_moe").layout,
    "qwen3_next": family("qwen3_next").layout,
    "qwen3_5_text": family("qwen3_5").layout,
    "deepseek_v32": family("deepseek_v32").layout,
    "glm_moe_dsa": family("glm_moe_dsa").layout,
    "mimo_v2_flash": family("mimo_v2").layout,
    "qwen3_moe": family("qwen3_moe").layout,
    "qwen3_moe, as vllm": family("qwen3_moe").layout.as_("vllm"),
    "mellum": family("mellum").layout,
    "step3p5": family("step3p5").layout,
    "nemotron_h": family("nemotron_h").layout,
    "bailing_moe_v3": family("bailing_moe_v3").layout,
    "exaone_moe": family("exaone_moe").layout,
    "exaone4_5_text": family("exaone4_5").layout,
    "deepseek_v3": family("deepseek_v3").layout,
    "deepseek_v3, as vllm": family("deepseek_v3").layout.as_("vllm"),
}


# other names in transformers, or no LM head: see test_step_trunks.py and its neighbours
NAMED_APART = ("step3p5", "nemotron_h", "bailing_moe_v3", "exaone_moe", "exaone4_5_text")


def models(kind: str, layout: HeadLayout, modules: int) -> tuple[Trunk, MTPHead]:
    raw = {**SMALL, **KINDS[kind], "num_hidden_layers": 2}
    if kind in NAMED_APART:
        trunk = Trunk(model_config(raw), SMALL["max_position_embeddings"], torch.float64)
        randomised(trunk.double()).double()
    else:
        trunk = our_trunk(raw, transformers_model(raw), torch.float64)
    head = MTPHead(trunk.config, layout, modules).double()
    randomised(head, seed=3)
    rope = trunk.config.rope_of_head
    if rope != trunk.config.rope and trunk.config.mla is None:
        head.rotate_by(RotaryTable(rope, SMALL["max_position_embeddings"], torch.float64))
    return trunk, head.double()


def engine_drafts(
    trunk: Trunk, head: MTPHead, ids: list[int], *, chunk: int, block_size: int
) -> tuple[list[int], list[Tensor]]:
    """The same through the paged cache, the prompt in chunks; then once more after a round of
    drafts was thrown away."""
    blocks = list(range(40))[::-1]  # not consecutive: addressed by table
    backend = TorchBackend(hand_made(trunk, head), BackendOptions(threads=1))
    backend.allocate(CacheSizes(40, block_size, num_states=1))
    drafter = Drafter(backend)
    seen: list[Tensor] = []
    plain = backend.draft_logits

    def keep(normed: Tensor, vocab: str | None, module: int) -> Tensor:
        seen.append(plain(normed, vocab, module))
        return seen[-1]

    backend.draft_logits = keep
    request = Request(
        "r", ids[:-4], SamplingParams(temperature=0), 0, 99, frozenset(), 0, blocks=blocks
    )

    def advance(stop: int) -> None:
        while request.num_computed < stop:
            count = min(chunk, stop - request.num_computed)
            at = request.num_computed
            is_recurrent = trunk.config.num_recurrent > 0
            slots = StateRows(0 if at else None, ((count, 0),)) if is_recurrent else None
            tokens = request.tokens[at : at + count]
            states, _ = backend.trunk_pass([TrunkRows(tokens, at, blocks, 0, True, slots)])
            drafter.feed(request, at, states[0])
            request.num_computed += count

    advance(len(ids) - 5)
    drafter.propose({request: NUM_DRAFTS})  # temporary entries, which must not survive
    request.tokens += ids[-4:]
    advance(len(ids) - 1)
    seen.clear()
    drafter.propose({request: NUM_DRAFTS})
    return request.drafts, [logits[0] for logits in seen]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


IDS = [5, 17, 2, 44, 8, 8, 31, 60, 3, 12, 9, 27]


# Every layout in one of the trunks, which take turns, unless there is time for all.
ALL = [(kind, name) for name in LAYOUTS for kind in ("qwen2", "qwen3")]
SOME = [case for number, case in enumerate(ALL) if number // 2 % 2 == number % 2]


@pytest.mark.parametrize(("kind", "name"), unless_long(SOME, ALL))
def test_drafts_and_their_logits_equal_the_straight_line_reference(kind: str, name: str) -> None:
    layout, modules = LAYOUTS[name]
    trunk, head = models(kind, layout, modules)
    expected, expected_logits = Straight(trunk, head).drafts(IDS)
    for chunk, block_size in ((20, 16), (3, 2)):
        drafts, logits = engine_drafts(trunk, head, IDS, chunk=chunk, block_size=block_size)
        assert drafts == expected
        for ours, theirs in zip(logits, expected_logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", OWN_LAYOUTS)
def test_drafts_of_other_families_equal_the_straight_line_reference(name: str) -> None:
    kind, layout = name.split(",")[0], OWN_LAYOUTS[name]
    trunk, head = models(kind, layout, 1 if layout.topology == "recursive" else 3)
    expected, expected_logits = Straight(trunk, head).drafts(IDS)
    drafts, logits = engine_drafts(trunk, head, IDS, chunk=3, block_size=2)
    assert drafts == expected
    for ours, theirs in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "halves swapped": ("one module, embed first", {"fuse_order": "hidden_first"}),
    "position 0 kept": ("one module, position 0 zeroed", {"zero_embed_at_position_0": False}),
    "final norm forgotten": ("one module, embed first", {"trunk_hidden": "before_final_norm"}),
    "wrong state recycled": ("one module, embed first", {"recycled_hidden": "before_out_norm"}),
    "chained fed as parallel": ("two chained", {"topology": "parallel"}),
    "parallel fed as chained": ("two parallel", {"topology": "chained"}),
}


@pytest.mark.parametrize(("name", "change"), CONTROLS.values(), ids=CONTROLS)
def test_a_head_run_by_another_layout_gives_other_logits(name: str, change: dict[str, Any]) -> None:
    layout, modules = LAYOUTS[name]
    trunk, head = models("qwen2", layout, modules)
    _, expected = Straight(trunk, head).drafts(IDS)
    other = MTPHead(trunk.config, replace(layout, **change), modules).double()
    other.load_state_dict(head.state_dict())
    _, logits = engine_drafts(trunk, other, IDS, chunk=20, block_size=16)
    differences = [(a - b).abs().max() for a, b in zip(logits, expected, strict=True)]
    assert max(differences) > 1e-3, "the reference does not notice"


def test_swapped_halves_of_the_fusion_matrix_give_other_logits() -> None:
    trunk, head = models("qwen3", *LAYOUTS["two chained"])
    _, expected = Straight(trunk, head).drafts(IDS)
    module = head.module(1)
    assert isinstance(module, MTPModule)
    module.fuse.weight.data = module.fuse.weight.data.roll(trunk.config.hidden, dims=1)
    _, logits = engine_drafts(trunk, head, IDS, chunk=20, block_size=16)
    assert (logits[0] - expected[0]).abs().max() > 1e-3


def test_the_last_module_drafts_all_further_depths() -> None:
    _, head = models("qwen2", *LAYOUTS["two chained"])
    assert [head.module(depth) for depth in (1, 2, 3, 9)] == [
        head.modules_[0], head.modules_[1], head.modules_[1], head.modules_[1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"fuse_order": "summed"}, {"zero_centred_norms": True}, {"out_norm": "shared"},
     {"trunk_hidden": "before_hc_head"}, {"recycled_hidden": "streams"}],
    ids=str,
)  # fmt: skip
def test_a_layout_that_is_not_computed_is_refused(change: dict[str, Any]) -> None:
    trunk, _ = models("qwen2", *LAYOUTS["two chained"])
    with pytest.raises(UnsupportedFamily, match="not run by the embedded engine"):
        MTPHead(trunk.config, replace(HeadLayout(), **change), 1)


def test_an_out_norm_without_the_mean_is_a_layer_norm() -> None:
    """What the last norm of Nemotron-H's head is: an RMS norm in vLLM, a layer norm elsewhere."""
    layout = family("nemotron_h").layout
    assert layout.unsettled == ("out_norm_mean",) and layout.out_norm_mean == "kept"
    module = models("nemotron_h", replace(layout, out_norm_mean="subtracted"), 1)[1].modules_[0]
    x = torch.randn(3, len(module.out_norm.weight)).double() + 1
    expected = torch.nn.functional.layer_norm(
        x, x.shape[-1:], module.out_norm.weight, eps=module.out_norm.eps
    )
    torch.testing.assert_close(module.out_norm(module._before_norm(x)), expected)
    assert (module.out_norm(x) - expected).abs().max() > 1e-2
