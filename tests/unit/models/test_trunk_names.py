"""Tiny checkpoints of newer families hold what transformers' classes of their trunks ask for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_edits import head_names, tensors
from support.tiny_fixture import Tiny

VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
    "out_hidden_size": 256, "projection_intermediate_size": 16,
}  # fmt: skip


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of transformers, and what it missed or did not know in the files."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_wrapped = "text_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if is_wrapped else AutoModelForCausalLM
    return kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)


@pytest.mark.parametrize(
    "variant",
    ["hy_v4", "glm5_next", "qwen4_exp", "bailing_moe_v3", "nemotron_h", "exaone_moe", "exaone4_5"],
)
def test_no_trunk_tensor_is_missing_or_unknown(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    own = {"ple_layer_ids": []} if variant == "qwen4_exp" else {}
    folder = shutil.copytree(tiny(variant, with_head=False, **own), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if "vision_config" in config:
        config["vision_config"] |= VISION
    (folder / "config.json").write_text(json.dumps(config))
    _, found = loaded(folder)
    assert [name for name in found["missing_keys"] if ".visual." not in name] == []
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
