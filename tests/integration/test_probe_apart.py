"""openPangu 2.0, which only the probe runs: its forward pass, and both contracts told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import headstart
from support.head_edits import Tensors, edited
from support.tiny_fixture import Tiny
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, silu

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig
from headstart.models.streamed_pangu import StreamedPangu

LAYERS, ROWS = 3, 160


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk that goes on by the last token, with a final norm that is far from uniform."""
    plain = tiny("openpangu_v2", dtype="F32", vocab_size=64)
    draw = torch.Generator().manual_seed(0)

    def change(own: Tensors) -> None:
        for name, value in own.items():
            if "post_attention_layernorm" in name or "post_mlp_layernorm" in name:
                value *= 0.02  # what a half layer adds has this size, whatever it computes
            if name.endswith("branch_beta_pre"):
                value.copy_(torch.tensor([0.5, 0.1, -0.3, 0.2]))
        hidden = len(own["model.norm.weight"])
        weights = torch.exp(torch.randn(hidden, generator=draw))
        weights *= torch.randint(2, (hidden,), generator=draw) * 2 - 1
        own["model.norm.weight"] *= weights
        own["lm_head.weight"] /= weights

    return edited(plain, tmp_path_factory.mktemp("normed") / "model", change=change)


def written(folder: Path, first: int, count: int) -> list[int]:
    """A text as the trunk would write it, token after token: it goes by the last one."""
    model = StreamedPangu(Checkpoint.open(folder))
    with torch.no_grad():
        read = model.norm(model.trunk(torch.arange(64)), model.final_norm)
    following = (read @ model.lm_head.T).argmax(-1).tolist()
    ids = [first]
    while len(ids) < count:
        ids.append(following[ids[-1]])
    assert len(set(ids)) > 40
    return ids


class Trained(StreamedPangu):
    """With a fusion of its own instead of the stored one."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__(checkpoint)
        self.fuse: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        own = getattr(self, "fuse", {})
        return own[name] if name in own else super().tensor(name)


def trained(folder: Path, kind: str, out: Path) -> Path:
    """A copy whose first module goes on from the trunk's state alone, before or after its norm."""
    model = Trained(Checkpoint.open(folder))
    ids = torch.tensor(written(folder, 5, ROWS))
    with torch.no_grad():
        before = model.trunk(ids)
        normed = model.norm(before, model.final_norm)
        goals = (normed @ model.lm_head.T).argmax(-1)[1:]
    state = (normed if kind == "after_final_norm" else before)[:-1]
    name = f"model.layers.{LAYERS}.eh_proj.weight"
    fuse = model.tensor(name).clone()
    width = fuse.shape[0]
    fuse[:, :width] = 0  # the embedding's half
    model.fuse[name] = fuse.requires_grad_(True)
    for _ in range(25):
        drafts = model.out(0, model.module(0, state, ids[1:], "embed_first")) @ model.lm_head.T
        (slope,) = torch.autograd.grad(cross_entropy(drafts, goals), fuse)
        with torch.no_grad():
            fuse[:, width:] -= 0.01 * slope[:, width:].sign()
    return edited(folder, out, change=lambda own: own.update({name: fuse.detach().clone()}))


def probed(model: Path, *words: str) -> dict[str, Any]:
    done = headstart("inspect", str(model), "--probe", "--json", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["probe"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("kind", "verdict"), [("before_final_norm", "registry"), ("after_final_norm", "other")]
)
def test_the_contract_of_a_head_is_told_whichever_engine_is_right(
    kind: str, verdict: str, folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(f"t{token}" for token in written(folder, 31, 96) if token > 1))
    found = probed(trained(folder, kind, tmp_path / "model"), "--probe-text", str(text))
    best = found["depth_1"][0]
    assert best["contract"] == {"trunk_hidden": kind, "fuse_order": "embed_first"}, found["said"]
    assert found["verdict"] == verdict and best["agreement"] > 0.2
    assert found["rows"] >= 60 and found["depth_1"][1]["margin"] > 3
    ways = {each["contract"]["recycled_hidden"] for each in found["depth_2"]}
    assert ways == {"after_out_norm", "before_out_norm"}


def test_a_shuffled_head_obeys_none(folder: Path, tmp_path: Path) -> None:
    name = f"model.layers.{LAYERS}.eh_proj.weight"

    def shuffle(own: Tensors) -> None:
        order = torch.randperm(len(own[name]), generator=torch.Generator().manual_seed(0))
        own[name] = own[name][order]

    assert probed(edited(folder, tmp_path / "model", change=shuffle))["verdict"] == "dead"


def test_what_it_cannot_take_is_refused(folder: Path, tmp_path: Path) -> None:
    refused = headstart("inspect", str(folder), "--probe", "--head", str(folder))
    assert refused.returncode == 2 and "only be probed with its own head" in refused.stderr
    model = edited(
        folder, tmp_path / "odd", change_config=lambda config: config.update(mhc_num_stream=None)
    )
    with pytest.raises(BadConfig, match="mhc_num_stream is None"):
        StreamedPangu(Checkpoint.open(model)).trunk(torch.tensor([1, 2]))


def test_attention_is_what_loops_over_rows_and_heads_give(folder: Path) -> None:
    """Written again, row by row: convolutions, sinks that every row sees, rotation, windows."""
    model = StreamedPangu(Checkpoint.open(folder))
    fields = {**model.fields, "swa_layers": [1], "sliding_window": 3}
    model.fields = fields
    get = model.below("model.layers.1.self_attn.")
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(6, model.embedding.shape[1], generator=draw)
    found = model._attention(get, x, 1)
    heads, nope, rope = (
        fields[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    rank, theta = fields["kv_lora_rank"], fields.get("rope_theta", 10000.0)

    def normed(row: Tensor, name: str) -> Tensor:
        return rms_norm(row, (len(row),), get(name), float(fields["rms_norm_eps"]))

    def convolved(rows: list[Tensor], name: str) -> list[Tensor]:
        weight = get(name)[:, 0]
        before = [torch.zeros_like(rows[0])] * 2 + rows
        return [
            row + sum(weight[:, i] * before[t + i] for i in range(3)) for t, row in enumerate(rows)
        ]

    def turned(row: Tensor, position: int) -> Tensor:
        half = rope // 2
        angles = torch.tensor([position * theta ** (-i / half) for i in range(half)])
        one, other = row[:half], row[half:]
        return torch.cat(
            [one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()]
        )

    latents = [get("q_a_proj.weight") @ row for row in x]
    queries = [
        get("q_b_proj.weight") @ normed(q, "q_a_layernorm.weight")
        for q in convolved(latents, "qa_conv.weight")
    ]
    pairs = [get("kv_a_proj_with_mqa.weight") @ row for row in x]
    keys = convolved([pair[:rank] for pair in pairs], "compresskv_conv.weight")
    turned_keys = [turned(pair[rank:], t) for t, pair in enumerate(pairs)]
    sinks = list(zip(get("param_sink_compressed_kv"), get("param_sink_k_pe"), strict=True))
    read = []
    for t, query in enumerate(queries):
        seen = [*sinks, *list(zip(keys, turned_keys, strict=True))[max(0, t - 2) : t + 1]]
        both = [
            (get("kv_b_proj.weight") @ normed(key, "kv_a_layernorm.weight")).view(heads, -1)
            for key, _ in seen
        ]
        row = []
        for head in range(heads):
            mine = query.view(heads, -1)[head]
            mine = torch.cat([mine[:nope], turned(mine[nope:], t)])
            scores = torch.stack([
                mine @ torch.cat([pair[head][:nope], rotated]) * (nope + rope) ** -0.5
                for pair, (_, rotated) in zip(both, seen, strict=True)
            ])  # fmt: skip
            shares = scores.softmax(0)
            row.append(
                sum(share * pair[head][nope:] for share, pair in zip(shares, both, strict=True))
            )
        read.append(torch.cat(row))
    expected = torch.stack([get("o_proj.weight") @ row for row in convolved(read, "o_conv.weight")])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_streams_are_mixed_and_given_back_row_by_row(folder: Path) -> None:
    model = StreamedPangu(Checkpoint.open(folder))
    draw = torch.Generator().manual_seed(3)
    streams, hidden = 4, model.embedding.shape[1]
    residual = torch.randn(2, streams, hidden, generator=draw)
    own = {
        "norm_gamma": torch.rand(streams * hidden, generator=draw),
        "phi.weight": torch.randn(24, streams * hidden, generator=draw) * 0.1,
        "branch_alpha": torch.tensor([0.5, 0.7, 0.9]),
        "branch_beta": torch.randn(24, generator=draw),
    }
    found = model._half(
        lambda name: own[name.removeprefix("mlp_mhc_module.")], "mlp", residual, silu
    )
    for t in range(2):
        flat = rms_norm(
            residual[t].flatten(),
            (streams * hidden,),
            own["norm_gamma"],
            float(model.fields["rms_norm_eps"]),
        )
        scores = own["phi.weight"] @ flat
        scales = own["branch_alpha"].repeat_interleave(torch.tensor([4, 4, 16]))
        scores = scores * scales + own["branch_beta"]
        mixed = sum((scores[i].sigmoid() + 1e-6) * residual[t, i] for i in range(4))
        among = scores[8:].view(4, 4).softmax(-1)
        for _ in range(200):  # to its limit, where rows and columns add up to 1
            among = among / among.sum(0)
            among = among / among.sum(1, keepdim=True)
        for j in range(4):
            kept = sum(among[i, j] * residual[t, i] for i in range(4))
            expected = 2 * scores[4 + j].sigmoid() * silu(mixed) + kept
            torch.testing.assert_close(found[t, j], expected, rtol=1e-2, atol=1e-2)
