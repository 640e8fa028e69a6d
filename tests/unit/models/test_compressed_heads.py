"""DeepSeek-V4's head against a reference in straight lines, from published names.

Written from what engines load and compute: two projections that are added, streams that a layer
reads, balances and writes, one entry of a token for all heads, what heads gather rotated back,
groups of heads with an output projection each, and streams that the head joins by its own weights.
Row t is run with its own chain behind it, as drafting does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support.engine_runs import checkpoint, make_prompts
from support.head_edits import edited, tensors
from support.tiny_fixture import Tiny
from torch import Tensor
from torch.nn.functional import silu

from headstart.checkpoint.reader import Checkpoint
from headstart.models.build import LoadedModel, build
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states, unroll

TEXT = make_prompts()[6]
DEPTHS = 3
EPS = 1e-6  # hc_eps, where a config is silent


class Straight:
    """One head, from the tensors of its files."""

    def __init__(self, folder: Path):
        self.fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.own = {
            name.removeprefix("mtp.0."): value.double()
            for name, value in tensors(folder).items()
            if name.startswith("mtp.0.")
        }

    def rms(self, x: Tensor, name: str = "") -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + self.fields["rms_norm_eps"]).sqrt()
        return normed * self.own[name] if name else normed

    def module(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """embedded [T, D], state [T, S, D] -> the LM head's row, and the streams handed on."""
        own = self.own
        added = self.rms(embedded, "enorm.weight") @ own["e_proj.weight"].T
        x = self.rms(state, "hnorm.weight") @ own["h_proj.weight"].T + added[:, None]
        x = self.half("attn", x, self.attention)
        x = self.half("ffn", x, self.experts)
        shares = self.shares("hc_head_", x)
        weights = (shares * own["hc_head_scale"] + own["hc_head_base"]).sigmoid() + EPS
        return self.rms(torch.einsum("ts,tsd->td", weights, x), "norm.weight"), x

    def shares(self, at: str, x: Tensor) -> Tensor:
        return self.rms(x.flatten(1)) @ self.own[f"{at}fn"].T

    def half(self, part: str, x: Tensor, run: Any) -> Tensor:
        """One row of the streams through half a layer, and back to all of them."""
        count, at = x.shape[1], f"hc_{part}_"
        read, write, mix = self.shares(at, x).split([count, count, count * count], -1)
        base = self.own[f"{at}base"].split([count, count, count * count])
        scale = self.own[f"{at}scale"]
        reads = (read * scale[0] + base[0]).sigmoid() + EPS
        writes = 2 * (write * scale[1] + base[1]).sigmoid()
        square = (mix * scale[2] + base[2]).view(-1, count, count).softmax(-1) + EPS
        square = square / (square.sum(1, keepdim=True) + EPS)
        for _ in range(self.fields.get("hc_sinkhorn_iters", 20) - 1):
            square = square / (square.sum(2, keepdim=True) + EPS)
            square = square / (square.sum(1, keepdim=True) + EPS)
        made = run(self.rms(torch.einsum("ts,tsd->td", reads, x), f"{part}_norm.weight"))
        return writes[..., None] * made[:, None] + torch.einsum("tij,tid->tjd", square, x)

    def turned(self, x: Tensor, position: int, back: bool = False) -> Tensor:
        """The last numbers, neighbours as pairs."""
        size = self.fields["qk_rope_head_dim"]
        base = float(self.fields["rope_theta"])
        angle = position * (1 / base ** (torch.arange(0, size, 2).float() / size)).double()
        angle = -angle if back else angle
        still, moved = x.split([x.shape[-1] - size, size], -1)
        one, other = moved[..., ::2], moved[..., 1::2]
        pairs = (one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin())
        return torch.cat([still, torch.stack(pairs, -1).flatten(-2)], -1)

    def attention(self, x: Tensor) -> Tensor:
        own, heads, dim = self.own, self.fields["num_attention_heads"], self.fields["head_dim"]
        latent = self.rms(x @ own["attn.wq_a.weight"].T, "attn.q_norm.weight")
        q = self.rms((latent @ own["attn.wq_b.weight"].T).unflatten(-1, (heads, dim)))
        kv = self.rms(x @ own["attn.wkv.weight"].T, "attn.kv_norm.weight")
        groups, rows = self.fields["o_groups"], []
        projections = own["attn.wo_a.weight"].chunk(groups)
        for t in range(len(x)):
            near = range(max(0, t - self.fields["sliding_window"] + 1), t + 1)
            entries = torch.stack([self.turned(kv[i], i) for i in near])
            given = []
            for head in range(heads):
                scores = (entries @ self.turned(q[t, head], t) / dim**0.5).exp()
                total = scores.sum() + own["attn.attn_sink"][head].exp()
                given.append(self.turned(scores @ entries / total, t, back=True))
            sides = torch.cat(given).chunk(groups)
            rows.append(torch.cat([p @ s for p, s in zip(projections, sides, strict=True)]))
        return torch.stack(rows) @ own["attn.wo_b.weight"].T

    def experts(self, x: Tensor) -> Tensor:
        own, result = self.own, []
        for row in x:
            scores = (own["ffn.gate.weight"] @ row).exp().log1p().sqrt()
            order = (scores + own["ffn.gate.bias"]).argsort(descending=True)
            chosen = order[: self.fields["num_experts_per_tok"]].tolist()
            total = self.swiglu(row, "ffn.shared_experts.")
            for expert in chosen:
                weight = scores[expert] / scores[chosen].sum()
                said = self.swiglu(row, f"ffn.experts.{expert}.")
                total = total + weight * self.fields["routed_scaling_factor"] * said
            result.append(total)
        return torch.stack(result)

    def swiglu(self, row: Tensor, at: str) -> Tensor:
        most = float(self.fields["swiglu_limit"])
        gate, down, up = (self.own[f"{at}w{n}.weight"] for n in (1, 2, 3))
        return down @ (silu((gate @ row).clamp(max=most)) * (up @ row).clamp(-most, most))


def of_row(straight: Straight, model: LoadedModel, states: Tensor, row: int) -> list[Tensor]:
    """States for the LM head at depths 1 to 3 from one row."""
    embedded = model.trunk.embed[torch.tensor(TEXT)]
    fed, found = states[: row + 1], []
    for depth in range(1, DEPTHS + 1):
        out, recycled = straight.module(embedded[1 : row + 1 + depth], fed)
        found.append(out[-1])
        fed = torch.cat([fed, recycled[-1:]])
    return found


@torch.inference_mode()
def test_drafts_equal_the_straight_line_reference(tiny: Tiny, tmp_path: Path) -> None:
    made = checkpoint(tiny, "deepseek_v4")

    def louder(own: dict[str, Tensor]) -> None:
        """Sinks, shares and corrections that show."""
        for name, value in own.items():
            if "hc_" in name or name.endswith(("attn_sink", "gate.bias")):
                own[name] = value * 30

    folder = edited(made, tmp_path / "louder", change=louder)
    model = build(Checkpoint.open(folder), device="cpu", dtype="float64")
    assert model.head is not None and model.config.streams is not None
    documents, ids = Documents((len(TEXT),)), torch.tensor(TEXT)
    states = trunk_states(model.trunk, ids, documents, model.head.layout.trunk_hidden)
    ours = unroll(
        model.head, model.trunk.embed[ids], model.trunk.rotary, states, documents,
        num_depths=DEPTHS,
    )  # fmt: skip
    streams = states.unflatten(1, (model.config.streams.count, -1))
    for row in (0, 3, 11, len(TEXT) - DEPTHS - 1):
        expected = of_row(Straight(folder), model, streams, row)
        for depth, (found, wanted) in enumerate(zip(ours, expected, strict=True), 1):
            difference = (found[row] - wanted).abs().max()
            assert difference < 1e-6, f"row {row}, depth {depth}: {difference}"
