"""openPangu 2.0 in straight lines, for the probe of contracts alone: a whole text, no caches.

Engines disagree about what its modules are fed and hand on, so the embedded engine does not run it;
this is what the probe needs to find out. Weights are read from disk layer by layer, in float32, and
given up again: memory is bounded by one layer. The trunk has several residual streams, mixed before
and after every half layer; latent attention has short convolutions and learned sinks, which every
row sees. Texts are shorter than what the indexer chooses, so it would choose everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softmax

from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load, to_float32
from headstart.errors import BadConfig, HeadNotFound
from headstart.heads.detection import find_head

Get = Callable[[str], Tensor]  # a tensor below one prefix
_EPS = 1e-6  # of mixing, not of norms
_ROTARY_BASE = 10000.0


class StreamedPangu:
    """The trunk of one checkpoint over a text, and its modules."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.fields = checkpoint, checkpoint.config.fields
        self.found = find_head(checkpoint)
        if not self.found.is_usable:
            raise HeadNotFound(
                f"{checkpoint.folder} has no whole head to probe: {self.found.state}."
            )
        self.layout = self.found.family.layout
        self.num_layers = self._number("num_hidden_layers")
        self.vocab_size = self._number("vocab_size")
        self.longest = int(self.fields.get("index_topk") or 2048)
        self.embedding = self.tensor("model.embed_tokens.weight")
        self.final_norm = self.tensor("model.norm.weight")
        self.lm_head = self.tensor("lm_head.weight")

    def tensor(self, name: str) -> Tensor:
        return to_float32(load(self.checkpoint.source(name)))

    def below(self, prefix: str) -> Get:
        return lambda name: self.tensor(prefix + name)

    def trunk(self, ids: Tensor) -> Tensor:
        """States [T, hidden] before the final norm, the streams merged."""
        streams = self._number("mhc_num_stream")
        residual = self.embedding[ids].unsqueeze(1).repeat(1, streams, 1)
        normed_blocks = self.fields.get("block_post_layernorm_idx") or ()
        for layer in range(self.num_layers):
            get = self.below(f"model.layers.{layer}.")
            residual = self._half(get, "attn", residual, self._attended(get, layer))
            residual = self._half(get, "mlp", residual, self._fed(get, layer))
            if layer in normed_blocks:
                flat = self.norm(residual.flatten(1), get("block_post_layernorm.weight"))
                residual = flat.view_as(residual)
        return self._merged(residual)

    def module(self, index: int, state: Tensor, ids: Tensor, order: str) -> Tensor:
        """One module over rows with their state and the token behind it; before its out norm."""
        layer = self.num_layers + index
        get = self.below(f"model.layers.{layer}.")
        embedded = self.norm(self.embedding[ids], get("enorm.weight"))
        pair = (embedded, self.norm(state, get("hnorm.weight")))
        x = torch.cat(pair if order == "embed_first" else pair[::-1], -1) @ get("eh_proj.weight").T
        x = x + self._attended(get, layer)(x)
        return x + self._fed(get, layer)(x)

    def out(self, index: int, x: Tensor) -> Tensor:
        """A module's state after its out norm."""
        return self.norm(
            x, self.tensor(f"model.layers.{self.num_layers + index}.shared_head.norm.weight")
        )

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = float(self.fields.get("rms_norm_eps") or 1e-5)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def _half(
        self, get: Get, half: str, residual: Tensor, run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Mix the streams [T, S, hidden] into one row, run it, and give it back to all of them."""
        count = residual.shape[1]
        own = f"{half}_mhc_module."
        normed = self.norm(residual.flatten(1), get(f"{own}norm_gamma"))
        parts = (normed @ get(f"{own}phi.weight").T).split([count, count, count * count], -1)
        bases = get(f"{own}branch_beta").split([count, count, count * count])
        scales = get(f"{own}branch_alpha")
        before, after, among = (
            part * scale + base for part, scale, base in zip(parts, scales, bases, strict=True)
        )
        mixed = ((before.sigmoid() + _EPS).unsqueeze(-1) * residual).sum(1)
        shares = self._balanced(among.unflatten(-1, (count, count)))  # [T, from, to]
        kept = shares.transpose(1, 2) @ residual
        given: Tensor = 2 * after.sigmoid().unsqueeze(-1) * run(mixed).unsqueeze(1)
        return given + kept

    def _balanced(self, logits: Tensor) -> Tensor:
        """Rows and columns that add up to 1, by Sinkhorn's steps."""
        matrix = softmax(logits, -1) + _EPS
        matrix = matrix / (matrix.sum(-2, keepdim=True) + _EPS)
        for _ in range(int(self.fields.get("mhc_recur_norm") or 20) - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + _EPS)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + _EPS)
        return matrix

    def _merged(self, residual: Tensor) -> Tensor:
        get = self.below("model.merge_mhc_module.")
        normed = self.norm(residual.flatten(1), get("norm_gamma"))
        scores = normed @ get("phi.weight").T * get("branch_alpha_pre") + get("branch_beta_pre")
        return (scores.sigmoid().unsqueeze(-1) * residual).sum(1)

    def _attended(self, get: Get, layer: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            inner = self._attention(
                lambda n: get(f"self_attn.{n}"), self.norm(x, get("input_layernorm.weight")), layer
            )
            return self.norm(inner, get("post_attention_layernorm.weight"))

        return run

    def _fed(self, get: Get, layer: int) -> Callable[[Tensor], Tensor]:
        is_dense = layer < int(self.fields.get("first_k_dense_replace") or 0)

        def run(x: Tensor) -> Tensor:
            x = self.norm(x, get("pre_mlp_layernorm.weight"))
            found = _mlp(get, "mlp.", x) if is_dense else self._experts(get, x)
            return self.norm(found, get("post_mlp_layernorm.weight"))

        return run

    def _attention(self, get: Get, x: Tensor, layer: int) -> Tensor:
        heads, nope = self._number("num_attention_heads"), self._number("qk_nope_head_dim")
        rope, rank = self._number("qk_rope_head_dim"), self._number("kv_lora_rank")
        query = _convolved(x @ get("q_a_proj.weight").T, get("qa_conv.weight"))
        query = self.norm(query, get("q_a_layernorm.weight")) @ get("q_b_proj.weight").T
        query = query.unflatten(-1, (heads, nope + rope))
        latent, key = (x @ get("kv_a_proj_with_mqa.weight").T).split([rank, rope], -1)
        latent = _convolved(latent, get("compresskv_conv.weight"))
        latent = torch.cat([get("param_sink_compressed_kv"), latent])  # sinks come first
        both = self.norm(latent, get("kv_a_layernorm.weight")) @ get("kv_b_proj.weight").T
        keys, values = both.unflatten(-1, (heads, -1)).split(
            [nope, both.shape[-1] // heads - nope], -1
        )
        rotated = torch.cat([get("param_sink_k_pe"), self._rotated(key.unsqueeze(1)).squeeze(1)])
        keys = torch.cat([keys, rotated.unsqueeze(1).expand(-1, heads, -1)], -1)
        query = torch.cat([query[..., :nope], self._rotated(query[..., nope:])], -1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * (nope + rope) ** -0.5
        scores = scores.masked_fill(~self._seen(len(x), len(keys) - len(x), layer), -torch.inf)
        read = torch.einsum("hqk,khd->qhd", softmax(scores, -1), values).flatten(1)
        return _convolved(read, get("o_conv.weight")) @ get("o_proj.weight").T

    def _seen(self, rows: int, sinks: int, layer: int) -> Tensor:
        """Which of the sinks and rows each row sees [T, sinks + T]."""
        distance = torch.arange(rows).unsqueeze(1) - torch.arange(rows)
        seen = distance >= 0
        sliding = list(self.fields.get("swa_layers") or ())
        if layer in sliding:
            windows = self.fields.get("sliding_window_list") or ()
            place = sliding.index(layer)
            window = windows[place] if place < len(windows) else self.fields.get("sliding_window")
            seen &= distance < int(window or rows)
        return torch.cat([torch.ones(rows, sinks, dtype=torch.bool), seen], 1)

    def _rotated(self, x: Tensor) -> Tensor:
        """Halves, or neighbours where the config says so, turned by position; x [T, heads, D]."""
        base, half = float(self.fields.get("rope_theta") or _ROTARY_BASE), x.shape[-1] // 2
        angles = torch.arange(len(x)).unsqueeze(1) * base ** (-torch.arange(half) / half)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        if self.fields.get("rope_interleave"):
            one, other = x[..., ::2], x[..., 1::2]
            return torch.stack([one * cos - other * sin, other * cos + one * sin], -1).flatten(-2)
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def _experts(self, get: Get, x: Tensor) -> Tensor:
        scores = (x @ get("mlp.gate.weight").T).sigmoid()
        wanted = scores
        if self.fields.get("router_enable_expert_bias"):
            wanted = scores + get("mlp.e_score_correction_bias")
        chosen = wanted.topk(self._number("num_experts_per_tok"), -1).indices
        weights = scores.gather(-1, chosen)
        if self.fields.get("norm_topk_prob", True):
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * float(self.fields.get("routed_scaling_factor") or 1.0)
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            made = _mlp(get, f"mlp.experts.{expert}.", x[rows])
            result.index_add_(0, rows, made * weights[rows, places].unsqueeze(-1))
        return (
            result + _mlp(get, "mlp.shared_experts.", x)
            if self.fields.get("n_shared_experts")
            else result
        )

    def _number(self, name: str) -> int:
        value: Any = self.fields.get(name)
        if type(value) is not int or value < 1:
            raise BadConfig(
                f"{self.checkpoint.folder}: {name} is {value!r} in config.json; expected a number "
                "above 0. Take the config of the release."
            )
        return value


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution over rows, channel by channel, added to what it reads."""
    padded = torch.cat([x.new_zeros(weight.shape[-1] - 1, x.shape[1]), x]).T.unsqueeze(0)
    return x + conv1d(padded, weight, groups=len(weight)).squeeze(0).T


def _mlp(get: Get, prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ get(f"{prefix}gate_proj.weight").T, x @ get(f"{prefix}up_proj.weight").T
    return (silu(gate) * up) @ get(f"{prefix}down_proj.weight").T
