"""Groups of compressed-tensors that describe a quantised head, in a model and by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.head_edits import WITH_HEAD, config, head_names, tensors
from support.quantized_models import plain_model, quantized_model
from support.tiny_fixture import Tiny

from headstart.checkpoint.quantized.writing import compressed_config
from headstart.checkpoint.reader import Checkpoint
from headstart.heads.config_groups import own_groups, trunk_patterns, with_groups
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head
from headstart.heads.head import Head, head_of
from headstart.heads.ignore_lists import is_listed
from headstart.heads.stitch import plan_stitch

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


def quantised_head(tiny: Tiny, family: str) -> Head:
    """The head of a model in FP8, described by itself, as of a model that is plain."""
    head = open_head(quantized_model(tiny, "fp8-row", family))
    found = own_groups(head)
    assert found is not None
    plain = {name: v for name, v in head.config.items() if name != "quantization_config"}
    return replace(head, config=plain, quantization=compressed_config(*found))


def test_a_group_whose_format_is_null_has_that_of_the_config(tiny: Tiny) -> None:
    head = quantised_head(tiny, "mimo")
    group = {"targets": ["Linear"], "weights": INT8, "format": None}
    model = compressed_config({"group_0": group}, "int-quantized")
    found = with_groups(head, head.naming(), model)
    assert found["format"] == "mixed-precision"
    formats = [each["format"] for each in found["config_groups"].values()]
    assert formats == ["float-quantized", "int-quantized"]
    groups = head.quantization["config_groups"]
    silent = {name: {**each, "format": None} for name, each in groups.items()}
    own = own_groups(replace(head, quantization={**head.quantization, "config_groups": silent}))
    assert own is not None and own[1] == "float-quantized"


@pytest.mark.parametrize("variant", WITH_HEAD)
def test_every_matrix_of_a_trunk_is_among_what_is_not_the_head(tiny: Tiny, variant: str) -> None:
    model = tiny(variant)
    head = head_of(Checkpoint.open(model))
    listed: dict[str, Any] = {
        "quant_method": "compressed-tensors", "ignore": trunk_patterns(head, head.naming())
    }  # fmt: skip
    beyond = set(head_names(model).values())
    matrices = [n for n, v in tensors(model).items() if v.dim() == 2 and n.endswith(".weight")]
    modules = {n.removesuffix(".weight"): n in beyond for n in matrices if "embed" not in n}
    assert [name for name, is_head in modules.items() if is_listed(listed, name) == is_head] == []


# family -> how SGLang asks for the attention of its head alone
ASKED = {
    "deepseek_v3": "model.decoder.self_attn.o_proj", "glm4_moe": "model.decoder.self_attn.qkv_proj",
    "qwen3_next": "model.layers.0.self_attn.qkv_proj", "mimo": "self_attn.qkv_proj",
}  # fmt: skip


@pytest.mark.parametrize("family", ASKED)
def test_a_draft_model_for_sglang_is_described_by_its_names(
    tiny: Tiny, family: str, tmp_path: Path
) -> None:
    head = quantised_head(tiny, family)
    plan_export(head, "sglang").write(tmp_path / "draft")
    found = config(tmp_path / "draft")["quantization_config"]
    (group,) = found["config_groups"].values()
    stored = tensors(tmp_path / "draft")
    scaled = {name.removesuffix(".weight_scale") for name in stored if name.endswith("_scale")}
    assert scaled and scaled <= set(group["targets"]) and ASKED[family] in group["targets"]
    plain = [n for n, v in stored.items() if v.dim() == 2 and n.endswith(".weight")]
    left = {name.removesuffix(".weight") for name in plain} - scaled
    assert (
        left and left <= set(found["ignore"]) and not set(found["ignore"]) & set(group["targets"])
    )
    if ASKED[family].startswith("model.decoder."):  # its layer is the first one now
        last = f"model.layers.{head.naming().num_layers}."
        assert not [name for name in group["targets"] if name.startswith(last)]
    back = open_head(tmp_path / "draft")
    assert back.is_quantized and back.quantization == head.quantization


def test_where_sglangs_names_are_not_known_the_draft_model_is_plain(
    tiny: Tiny, tmp_path: Path
) -> None:
    head = quantised_head(tiny, "mimo")
    unnamed = replace(head, family=replace(head.family, looked_up_as={}))
    operation = plan_export(unnamed, "sglang")
    assert any("under which names SGLang asks" in change for change in operation.changes)
    operation.write(tmp_path / "draft")
    assert "quantization_config" not in config(tmp_path / "draft")
    assert not open_head(tmp_path / "draft").is_quantized


@pytest.mark.parametrize(("family", "is_said"), [("mimo", True), ("glm4_moe", False)])
def test_a_model_that_sglang_would_read_wrong_is_said(
    tiny: Tiny, family: str, is_said: bool
) -> None:
    plan = plan_stitch(quantised_head(tiny, family), Checkpoint.open(plain_model(tiny, family)))
    assert any("SGLang asks for the head under names of" in n for n in plan.changes) == is_said
