"""Heads of trunks with several residual streams, against references in straight lines.

The references are written from what engines load and compute: published names in, one text, every
entry and every key written out, no cache. Row t is run with its own chain behind it, as drafting
does: depth k sees the pairs up to t and the chain's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import checkpoint, make_prompts
from support.head_edits import tensors
from support.tiny_fixture import Tiny
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.models.build import LoadedModel, build
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states, unroll

TEXT = make_prompts()[6]
DEPTHS = 3


class Straight:
    """One head, from the tensors of its files."""

    def __init__(self, folder: Path):
        self.fields = Config(json.loads((folder / "config.json").read_text())).fields
        self.stored = {name: value.double() for name, value in tensors(folder).items()}
        self.eps = float(self.fields["rms_norm_eps"])

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.stored[name]

    def fused(self, at: str, embedded: Tensor, state: Tensor) -> Tensor:
        pair = self.rms(embedded, f"{at}enorm.weight"), self.rms(state, f"{at}hnorm.weight")
        return torch.cat(pair, -1) @ self.stored[f"{at}eh_proj.weight"].T

    def swiglu(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, most: float) -> Tensor:
        inner, other = x @ gate.T, x @ up.T
        if most > 0:
            inner, other = inner.clamp(max=most), other.clamp(-most, most)
        return (silu(inner) * other) @ down.T

    def experts(self, at: str, x: Tensor, *, shared_limit: float) -> Tensor:
        own, most = self.stored, float(self.fields["swiglu_limit"])
        result = []
        for row in x:
            scores = (own[f"{at}gate.weight"] @ row).sigmoid()
            order = (scores + own[f"{at}gate.e_score_correction_bias"]).argsort(descending=True)
            chosen = order[: self.fields["num_experts_per_tok"]].tolist()
            names = [f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")]
            total = self.swiglu(row, *(own[at + name] for name in names), shared_limit)
            for expert in chosen:
                names = [
                    f"{at}experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")
                ]
                said = self.swiglu(row, *(own[name] for name in names), most)
                weight = scores[expert] / scores[chosen].sum()
                total = total + weight * self.fields["routed_scaling_factor"] * said
            result.append(total)
        return torch.stack(result)

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Neighbours rotated by position."""
        half = x.shape[-1] // 2
        base = float(self.fields["rope_theta"])
        angle = position * (1 / base ** (torch.arange(half).float() / half)).double()
        one, other = x[..., ::2], x[..., 1::2]
        parts = (
            one * angle.cos() - other * angle.sin(),
            other * angle.cos() + one * angle.sin(),
        )
        return torch.stack(parts, -1).flatten(-2)

    def latent_attention(
        self, at: str, x: Tensor, chosen: Callable[..., list[list[int]]]
    ) -> Tensor:
        own, fields = self.stored, self.fields
        heads, rank = fields["num_attention_heads"], fields["kv_lora_rank"]
        nope, rope = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
        latent = self.rms(x @ own[f"{at}q_a_proj.weight"].T, f"{at}q_a_layernorm.weight")
        q = (latent @ own[f"{at}q_b_proj.weight"].T).unflatten(-1, (heads, nope + rope))
        kept, key = (x @ own[f"{at}kv_a_proj_with_mqa.weight"].T).split([rank, rope], -1)
        both = self.rms(kept, f"{at}kv_a_layernorm.weight") @ own[f"{at}kv_b_proj.weight"].T
        both = both.unflatten(-1, (heads, -1))
        sinks = own.get(f"{at}learnable_sink_param")
        result = []
        for t, seen in enumerate(chosen(f"{at}indexer.", x, latent)):
            row = []
            for head in range(heads):
                query = torch.cat([q[t, head, :nope], self.turned(q[t, head, nope:], t)])
                scores = [
                    torch.cat([both[i, head, :nope], self.turned(key[i], i)]) @ query for i in seen
                ]
                shares = (torch.stack(scores) * (nope + rope) ** -0.5).exp()
                sunk = 0 if sinks is None else sinks[head].exp()
                row.append(shares @ both[seen, head, nope:] / (shares.sum() + sunk))
            result.append(torch.cat(row))
        found = torch.stack(result)
        if f"{at}linear_gate.weight" in own:
            found = found * (x @ own[f"{at}linear_gate.weight"].T).sigmoid()
        return found @ own[f"{at}o_proj.weight"].T


class HyV4(Straight):
    """[e; h], a plain block with gates, sinks and an indexer that rotates last; recycled normed."""

    at = "model.mtp_layers.0."

    def module(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fused(self.at, embedded, state)
        inner = self.rms(x, f"{self.at}input_layernorm.weight")
        x = x + self.latent_attention(f"{self.at}self_attn.", inner, self.chosen)
        inner = self.rms(x, f"{self.at}post_attention_layernorm.weight")
        x = x + self.experts(f"{self.at}mlp.", inner, shared_limit=0)
        out = self.rms(x, f"{self.at}final_layernorm.weight")
        return out, out

    def chosen(self, at: str, x: Tensor, latent: Tensor) -> list[list[int]]:
        own, size = self.stored, self.fields["index_head_dim"]
        heads, still = self.fields["index_n_heads"], size - self.fields["qk_rope_head_dim"]
        keys = layer_norm(
            x @ own[f"{at}wk.weight"].T, (size,), own[f"{at}k_norm.weight"],
            own[f"{at}k_norm.bias"], 1e-6,
        )  # fmt: skip
        q = (latent @ own[f"{at}wq_b.weight"].T).unflatten(-1, (heads, size))
        weights, result = x @ own[f"{at}weights_proj.weight"].T, []

        def turned(row: Tensor, position: int) -> Tensor:
            return torch.cat([row[..., :still], self.turned(row[..., still:], position)], -1)

        for t in range(len(x)):
            scores = [
                float((turned(q[t], t) @ turned(keys[i], i)).relu() @ weights[t])
                for i in range(t + 1)
            ]
            best = sorted(range(t + 1), key=lambda i, found=scores: -found[i])
            result.append(sorted(best[: self.fields["index_topk"]]))
        return result


class Glm5Next(Straight):
    """[e; h], a plain block without positions, whose rows choose pools; recycled normed."""

    at = "model.language_model.layers.2."

    def turned(self, x: Tensor, position: int) -> Tensor:
        return x

    def module(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fused(self.at, embedded, state)
        inner = self.rms(x, f"{self.at}input_layernorm.weight")
        x = x + self.latent_attention(f"{self.at}self_attn.", inner, self.chosen)
        inner = self.rms(x, f"{self.at}post_attention_layernorm.weight")
        x = x + self.experts(f"{self.at}mlp.", inner, shared_limit=self.fields["swiglu_limit"])
        out = self.rms(x, f"{self.at}shared_head.norm.weight")
        return out, out

    def chosen(self, at: str, x: Tensor, latent: Tensor) -> list[list[int]]:
        own, size, pool = self.stored, self.fields["index_head_dim"], self.fields["index_kpool"]
        keys = layer_norm(
            x @ own[f"{at}wk.weight"].T, (size,), own[f"{at}k_norm.weight"],
            own[f"{at}k_norm.bias"], 1e-6,
        )  # fmt: skip
        gates = x @ own[f"{at}index_kpool_compress_gate"].T
        q = (latent @ own[f"{at}wq_b.weight"].T).unflatten(-1, (-1, size))
        weights, result = x @ own[f"{at}weights_proj.weight"].T, []
        for t in range(len(x)):
            scores = []
            for first in range(0, t + 2 - pool, pool):
                inside = slice(first, first + pool)
                shares = (gates[inside] + own[f"{at}index_kpool_compress_ape"]).softmax(0)
                scores.append(float((q[t] @ (shares * keys[inside]).sum(0)).relu() @ weights[t]))
            best = sorted(range(len(scores)), key=lambda i, found=scores: -found[i])
            seen = [
                p * pool + i for p in best[: self.fields["index_topk"] // pool] for i in range(pool)
            ]
            result.append(sorted([*seen, *range(len(scores) * pool, t + 1)]))
        return result


class Qwen4Exp(Straight):
    """fc_hidden of every stream plus fc_embedding, a block between gated connections; streams are
    recycled, its own mixer gives what the LM head reads. All norms are 1 + w."""

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.stored[name])

    def module(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        own, count = self.stored, self.fields["hc_count"]
        token = self.rms(embedded, "mtp.pre_fc_norm_embedding.weight")
        normed = self.rms(state, "mtp.pre_fc_norm_hidden.weight")  # one norm over all streams
        streams = [part @ own["mtp.fc_hidden.weight"].T for part in normed.chunk(count, -1)]
        added = token @ own["mtp.fc_embedding.weight"].T
        x = torch.cat([stream + added for stream in streams], -1)
        for half, run in (("attn", self.attention), ("mlp", self.feed)):
            row, weights = self.mixed(f"mtp.layers.0.{half}_hyper_connection.", x)
            made = run("mtp.layers.0.", row)
            x = x + torch.cat([weights[:, [s]] * made for s in range(count)], -1)
        return self.mixed("mtp.hyper_connection_mixer.", x)[0], x

    def mixed(self, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        own, count = self.stored, self.fields["hc_count"]
        parts = zip(x.chunk(count, -1), own[f"{at}hc_norm.weight"].chunk(count), strict=True)
        normed = torch.cat(
            [s / (s.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + w) for s, w in parts],
            -1,
        )
        inner = silu(normed @ own[f"{at}input_mix_weight_down.weight"].T / count)
        gated = (inner @ own[f"{at}input_mix_weight_up.weight"].T).sigmoid() * normed
        inject = own.get(f"{at}block_inject_weight.weight", own[f"{at}hc_norm.weight"][None] * 0)
        weights = 2 * (normed @ inject.T / count).sigmoid()
        return sum(gated.chunk(count, -1)) / count, weights

    def half_turned(self, x: Tensor, position: int) -> Tensor:
        """The first quarter of a head of attention rotated, halves apart."""
        size = int(self.fields["head_dim"] * self.fields["partial_rotary_factor"])
        angle = (
            position
            * (1 / self.fields["rope_theta"] ** (torch.arange(0, size, 2).float() / size)).double()
        )
        one, other, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
        parts = (one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin())
        return torch.cat([*parts, rest], -1)

    def attention(self, at: str, x: Tensor) -> Tensor:
        at, own, dim = f"{at}self_attn.", self.stored, self.fields["head_dim"]
        heads, kv = self.fields["num_attention_heads"], self.fields["num_key_value_heads"]
        both = (x @ own[f"{at}q_proj.weight"].T).unflatten(-1, (heads, 2 * dim))
        q, gate = both.split([dim, dim], -1)
        q = self.rms(q, f"{at}q_norm.weight")
        k = (x @ own[f"{at}k_proj.weight"].T).unflatten(-1, (kv, dim))
        k = self.rms(k, f"{at}k_norm.weight")
        v = (x @ own[f"{at}v_proj.weight"].T).unflatten(-1, (kv, dim))
        result = []
        for t, seen in enumerate(self.chosen(f"{at}indexer.", x)):
            row = []
            for head in range(heads):
                of = head // (heads // kv)
                query = self.half_turned(q[t, head], t)
                keys = torch.stack([self.half_turned(k[i, of], i) for i in seen])
                row.append((keys @ query / dim**0.5).softmax(-1) @ v[seen, of])
            result.append(torch.cat(row))
        return (torch.stack(result) * gate.flatten(1).sigmoid()) @ own[f"{at}o_proj.weight"].T

    def chosen(self, at: str, x: Tensor) -> list[list[int]]:
        size, pool = self.fields["indexer_head_dim"], self.fields["indexer_compress_ratio"]
        both = (x @ self.stored[f"{at}index_qk_proj.weight"].T).unflatten(-1, (-1, size))
        q, keys = self.rms(both[:, :-1], f"{at}q_layernorm.weight"), both[:, -1]
        result = []
        for t in range(len(x)):
            scores = []
            for first in range(0, t + 2 - pool, pool):
                mean = keys[first : first + pool].mean(0)
                key = self.half_turned(self.rms(mean, f"{at}k_layernorm.weight"), first)
                scores.append(float((self.half_turned(q[t], t) @ key).relu().sum()))
            best = sorted(range(len(scores)), key=lambda i, found=scores: -found[i])
            few = best[: self.fields["indexer_budget"] // pool]
            seen = [p * pool + i for p in few for i in range(pool)]
            result.append(sorted([*seen, *range(len(scores) * pool, t + 1)]))
        return result

    def feed(self, at: str, x: Tensor) -> Tensor:
        at, own, result = f"{at}mlp.", self.stored, []
        for row in x:
            scores = (own[f"{at}gate.weight"] @ row).softmax(-1)
            chosen = scores.argsort(descending=True)[: self.fields["num_experts_per_tok"]].tolist()
            shared = (f"{at}shared_expert.{part}_proj.weight" for part in ("gate", "up", "down"))
            total = self.swiglu(row, *(own[name] for name in shared), 0)
            total = total * (own[f"{at}shared_expert_gate.weight"] @ row).sigmoid()
            for expert in chosen:
                names = (
                    f"{at}experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")
                )
                said = self.swiglu(row, *(own[name] for name in names), 0)
                total = total + scores[expert] / scores[chosen].sum() * said
            result.append(total)
        return torch.stack(result)


FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "hy_v4": (HyV4, {}),
    "glm5_next": (Glm5Next, {}),
    "qwen4_exp": (Qwen4Exp, {}),
}


def of_row(straight: Any, model: LoadedModel, states: Tensor, row: int) -> list[Tensor]:
    """States for the LM head at depths 1 to 3 from one row."""
    embedded = model.trunk.embed[torch.tensor(TEXT)]
    fed, found = states[: row + 1], []
    for depth in range(1, DEPTHS + 1):
        out, recycled = straight.module(embedded[1 : row + 1 + depth], fed)
        found.append(out[-1])
        fed = torch.cat([fed, recycled[-1:]])
    return found


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_equal_the_straight_line_reference(family: str, tiny: Tiny) -> None:
    kind, changes = FAMILIES[family]
    folder = checkpoint(tiny, family, **changes)
    model = build(Checkpoint.open(folder), device="cpu", dtype="float64")
    assert model.head is not None
    documents, ids = Documents((len(TEXT),)), torch.tensor(TEXT)
    states = trunk_states(model.trunk, ids, documents, model.head.layout.trunk_hidden)
    ours = unroll(
        model.head, model.trunk.embed[ids], model.trunk.rotary, states, documents,
        num_depths=DEPTHS,
    )  # fmt: skip
    for row in (0, 3, 11, len(TEXT) - DEPTHS - 1):
        expected = of_row(kind(folder), model, states, row)
        for depth, (found, wanted) in enumerate(zip(ours, expected, strict=True), 1):
            difference = (found[row] - wanted).abs().max()
            assert difference < 1e-6, f"row {row}, depth {depth}: {difference}"
