"""Tiny checkpoints of newer families hold what transformers' classes of their trunks ask for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import checkpoint, make_prompts
from support.head_edits import head_names, tensors
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.models.build import build
from headstart.models.documents import Documents
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable
from headstart.models.unroll import unroll

VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
    "out_hidden_size": 256, "projection_intermediate_size": 16,
}  # fmt: skip


NGRAMS = {
    "ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "ple_conv_kernel_size": 4,
    "ngram_size": 3,
}  # fmt: skip


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of transformers, and what it missed or did not know in the files."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_wrapped = "text_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if is_wrapped else AutoModelForCausalLM
    return kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)


@pytest.mark.parametrize(
    "variant",
    [
        "hy_v4",
        "glm5_next",
        "qwen4_exp",
        "deepseek_v4",
        "bailing_moe_v3",
        "nemotron_h",
        "exaone_moe",
        "exaone4_5",
        "qwen3_moe",
    ],
)
def test_no_trunk_tensor_is_missing_or_unknown(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    own = NGRAMS if variant == "qwen4_exp" else {}
    folder = shutil.copytree(tiny(variant, with_head=False, **own), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if "vision_config" in config:
        config["vision_config"] |= VISION
    (folder / "config.json").write_text(json.dumps(config))
    _, found = loaded(folder)
    computed = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    missing = [name for name in found["missing_keys"] if not name.endswith(computed)]
    assert [name for name in missing if ".visual." not in name] == []
    assert list(found["unexpected_keys"]) == list(found["mismatched_keys"]) == []


def test_transformers_drafts_with_the_head_of_mellum_under_our_names(tiny: Tiny) -> None:
    """Its generate(use_mtp=True) reads the head from the checkpoint and must change nothing."""
    folder = tiny("mellum", dtype="F32")
    model, found = loaded(folder)
    assert list(found["missing_keys"]) == list(found["unexpected_keys"]) == []
    prompt = torch.arange(2, 10)[None]
    plain, drafted = (
        model.generate(prompt, max_new_tokens=8, do_sample=False, use_mtp=use).tolist()
        for use in (False, True)
    )
    assert plain == drafted
    from transformers.modeling_layers import MtpModel

    read = dict(MtpModel.from_pretrained(model).named_parameters())
    fuse = tensors(folder)[head_names(folder)["modules.0.fuse.weight"]]
    assert any(torch.equal(value.detach(), fuse) for value in read.values())


@torch.inference_mode()
def test_our_head_of_mellum_says_what_that_of_transformers_says(tiny: Tiny) -> None:
    """Both over a whole text, and once more fed with what the first pass recycles."""
    folder = checkpoint(tiny, "mellum")
    model = loaded(folder)[0]
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    theirs = MtpModel.from_pretrained(model)
    ours = build(Checkpoint.open(folder), device="cpu", dtype="float32")
    assert ours.head is not None
    ids, docs = torch.tensor(make_prompts()[6]), Documents((len(make_prompts()[6]),))
    states = model.model(ids[None]).last_hidden_state
    found = unroll(
        ours.head, ours.trunk.embed[ids], ours.trunk.rotary, states[0], docs, num_depths=2,
        context="sequence",
    )  # fmt: skip
    for depth in (1, 2):
        rows = len(ids) - depth
        states = theirs.forward_layer(
            0, states[:, :rows], torch.arange(depth, len(ids))[None],
            MtpCache(config=theirs.config), input_ids=ids[None, depth:],
        )  # fmt: skip
        torch.testing.assert_close(found[depth - 1][:rows], states[0], atol=1e-4, rtol=1e-4)
    wide = replace(ours.head.config, sliding=replace(ours.head.config.sliding, window=7))
    other = MTPHead(wide, ours.head.layout, 1)
    other.load_state_dict(ours.head.state_dict())
    (wrong,) = unroll(
        other, ours.trunk.embed[ids], ours.head.module(1).rotary or ours.trunk.rotary,
        model.model(ids[None]).last_hidden_state[0], docs, num_depths=1,
    )  # fmt: skip
    assert (wrong - found[0])[: len(ids) - 1].abs().max() > 1e-3, "a wider window would not show"


@torch.inference_mode()
def test_the_head_of_qwen4_exp_rotates_by_a_theta_of_its_own(tiny: Tiny) -> None:
    plain, own = (
        build(Checkpoint.open(checkpoint(tiny, "qwen4_exp", **changes)), dtype="float32")
        for changes in ({}, {"mtp": {"num_hidden_layers": 1, "rope_theta": 100.0}})
    )
    assert plain.head is not None and plain.head.module(1).rotary is None
    assert own.head is not None and own.trunk.config.rope == plain.trunk.config.rope
    table = own.head.module(1).rotary
    assert table is not None
    rope = replace(own.trunk.config.rope, theta=100.0)
    expected = RotaryTable(rope, table.num_positions, torch.float32)
    assert torch.equal(table.cos, expected.cos)
    assert not torch.equal(table.cos, own.trunk.rotary.cos[: table.num_positions])
