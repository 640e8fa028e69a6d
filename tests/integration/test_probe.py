"""The doctor: heads trained under a known contract, a shuffled one, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import checkpoint
from support.head_edits import edited
from support.tiny_fixture import Tiny
from torch.nn.functional import cross_entropy

from headstart.checkpoint.reader import Checkpoint
from headstart.cli import inspect as command
from headstart.errors import ConfigError, DataError, HeadNotFound
from headstart.models.build import LoadedModel, build
from headstart.models.documents import Documents
from headstart.models.unroll import StateKind, teacher_states, trunk_states, unroll
from headstart.simulate.probe import continued, probe

DOCUMENT = 32


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "nemotron_h"])
def test_a_head_beyond_dense_is_probed(family: str, tiny: Tiny) -> None:
    """What a recurrent layer goes on from was once looked for in a cache of keys."""
    built = build(Checkpoint.open(checkpoint(tiny, family)), device="cpu", dtype="float64")
    ids = continued(built.trunk, [3, 9, 21], 6, 64)
    assert len(ids) == 9
    with torch.inference_mode():
        states = trunk_states(built.trunk, torch.tensor(ids), Documents((9,)), "after_final_norm")
        assert built.trunk.logits(states)[2:-1].argmax(-1).tolist() == ids[3:]
    assert max(variant.agreement for variant in probe(built).variants) > 0.2


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    """A trunk whose final norm is far from uniform, and whose choices are as before."""
    plain = checkpoint(tiny, "mimo")
    out = plain.parent / f"{plain.name}-normed"
    draw = torch.Generator().manual_seed(0)

    def change(own: dict[str, torch.Tensor]) -> None:
        weights = torch.exp(torch.randn(128, generator=draw))
        weights *= torch.randint(2, (128,), generator=draw) * 2 - 1
        own["model.norm.weight"] *= weights
        own["lm_head.weight"] /= weights

    return edited(plain, out, change=change)


def trained(folder: Path, kind: StateKind) -> LoadedModel:
    """The head taught to go on from the trunk's state alone, before or after the final norm."""
    built = build(Checkpoint.open(folder), device="cpu", dtype="float32")
    trunk, head = built.trunk, built.head
    assert head is not None
    starts = [continued(trunk, [token], DOCUMENT - 1, DOCUMENT) for token in range(2, 64, 3)]
    ids = torch.tensor([token for text in starts for token in text])
    documents = Documents((DOCUMENT,) * len(starts))
    states = trunk_states(trunk, ids, documents, kind)
    choices = trunk.logits(teacher_states(trunk, states, kind)).argmax(-1)
    rows = documents.tokens_left(ids.device) >= 1
    goals = documents.ahead(choices, 1)[rows]
    fuse = head.module(1).fuse.weight.requires_grad_(True)
    hidden = torch.zeros_like(fuse)
    hidden[:, : fuse.shape[0]] = 1  # mimo fuses the hidden state first
    fuse.data.mul_(hidden)
    steps = torch.optim.Adam([fuse], lr=0.01)
    for _ in range(25):
        (normed,) = unroll(
            head, trunk.embed[ids], trunk.rotary, states, documents, num_depths=1
        )  # fmt: skip
        loss = cross_entropy(trunk.logits(normed[rows]), goals)
        steps.zero_grad()
        loss.backward()
        assert fuse.grad is not None
        fuse.grad.mul_(hidden)
        steps.step()
    fuse.requires_grad_(False)
    return built


def test_norm_contract(folder: Path) -> None:
    """The doctor picks the right variant for a head trained after, or before, the final norm."""
    after = probe(trained(folder, "after_final_norm"))
    assert after.verdict == "registry", after.said
    assert after.variants[0].contract == {
        "trunk_hidden": "after_final_norm", "fuse_order": "hidden_first",
    }  # fmt: skip
    assert after.variants[0].agreement > 0.2 and after.variants[1].margin > 3
    before = probe(trained(folder, "before_final_norm"))
    assert before.verdict == "other", before.said
    assert before.variants[0].contract == {
        "trunk_hidden": "before_final_norm", "fuse_order": "hidden_first",
    }  # fmt: skip
    assert "before final norm, hidden first" in before.said


def test_a_disputed_norm_is_tried_both_ways(tiny: Tiny) -> None:
    """Nemotron-H: rows of the block's output that have a mean tell one norm from the other."""
    built = build(Checkpoint.open(checkpoint(tiny, "nemotron_h")), device="cpu", dtype="float32")
    assert built.head is not None
    module = built.head.module(1)
    plain = probe(built)
    assert len(plain.variants) == 8 and plain.registry["out_norm_mean"] == "kept"
    with torch.inference_mode():
        module.block.mlp.shared.down.weight += 0.5  # the same for every channel: a mean
    shifted = probe(built)
    best = shifted.variants[0]
    assert best.contract["out_norm_mean"] == "subtracted" and best.agreement > 0.2
    kept = [v for v in shifted.variants if v.contract == {**best.contract, "out_norm_mean": "kept"}]
    assert kept[0].agreement < best.agreement / 2, "both norms do as well"
    assert shifted.verdict == "other" and "mean before the out norm subtracted" in shifted.said


def test_a_shuffled_head_is_dead_and_the_layout_is_put_back(tiny: Tiny) -> None:
    built = build(Checkpoint.open(checkpoint(tiny, "mimo")), device="cpu", dtype="float32")
    assert probe(built).variants[0].agreement > 0.2
    assert built.head is not None
    layout, fuse = built.head.layout, built.head.module(1).fuse
    order = torch.randperm(len(fuse.weight), generator=torch.Generator().manual_seed(0))
    fuse.weight.data = fuse.weight[order]
    found = probe(built)
    assert found.verdict == "dead" and "or trained too little" in found.said
    assert "dead" not in found.said, "the verdict stands before it"
    assert built.head.layout == layout == built.head.module(1).layout


def inspected(model: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    command.run(model=str(model), json_output=True, probe=True, dtype="float32", **options)
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_the_command_says_what_was_found(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint(tiny, "mimo")
    found = inspected(model, capsys)["probe"]
    assert found["verdict"] == "registry" and found["rows"] == 95
    assert len(found["depth_1"]) == 4 and len(found["depth_2"]) == 2
    assert found["depth_1"][0]["contract"]["fuse_order"] == "hidden_first"
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{(7 * i) % 60 + 2}" for i in range(80)))
    assert inspected(model, capsys, probe_text=text)["probe"]["rows"] == 143
    command.run(model=str(model), probe=True, probe_text=text, dtype="float32")
    shown = capsys.readouterr().out
    assert "after final norm, hidden first (registry)" in shown and "registry: " in shown
    assert shown.index("registry: ") < shown.index("vllm serve")


def test_what_cannot_be_probed_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = checkpoint(tiny, "mimo")
    with pytest.raises(ConfigError, match="belong to --probe"):
        command.run(model=str(model), probe_text=tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        command.run(model=str(model), probe=True, probe_text=tmp_path / "none")
    text = tmp_path / "text.txt"
    text.write_text("hello")
    with pytest.raises(DataError, match="fewer than 8 of them different"):
        command.run(model=str(model), probe=True, probe_text=text)
    with pytest.raises(HeadNotFound, match="no head to probe"):
        command.run(model=str(tiny("llama", with_head=False)), probe=True)
