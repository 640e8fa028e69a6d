"""What a config declares, and what only looks like a head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.config import Config
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.index import Index
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import UnsupportedFamily
from headstart.families.registry import GRAFTED_AS
from headstart.heads.detection import declared_count, find_family, find_head
from headstart.heads.formats import format_of
from headstart.heads.formats.speculators import _our_name, _their_name
from headstart.heads.pitfalls import pitfalls
from headstart.models.config_reader import model_config

DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 8}


def checkpoint(config: dict[str, Any], *names: str) -> Checkpoint:
    tensors = {n: TensorInfo(n, "BF16", (), Path("nowhere"), 0, 0) for n in names}
    return Checkpoint(Path("nowhere"), Config(config), Index(tensors, {}, False, (), {}, {}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"num_nextn_predict_layers": 1}, 1),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": None}, None),
        ({"text_config": {"mtp_num_hidden_layers": 1}, "num_nextn_predict_layers": 3}, 1),
        ({"text_config": {}, "mtp_num_hidden_layers": 2}, 2),
        ({"mtp_config": {"num_nextn_predict_layers": 8}}, 8),
        ({"num_mtp_modules": 3}, 3),
    ],
    ids=["silent", "one", "zero", "null", "text first", "top level", "mtp_config", "minimax"],
)
def test_the_count_is_read_from_where_families_keep_it(
    config: dict[str, Any], expected: int | None
) -> None:
    assert declared_count(Config(config)) == expected


def test_extra_layers_without_fusion_or_head_norms_are_not_a_head() -> None:
    """Only a fusion tensor proves a head: other things live beyond the trunk, too."""
    found = find_head(checkpoint(DEEPSEEK, "model.layers.61.mlp.down_proj.weight"))
    assert found.state == "absent"
    assert found.tensors == {}


def test_a_layer_number_is_compared_as_a_number() -> None:
    found = find_head(checkpoint(DEEPSEEK, "model.layers.6.eh_proj.weight"))
    assert found.tensors == {}


def test_repackaged_v32_is_told_by_its_index_fields() -> None:
    config = {**DEEPSEEK, "index_topk": 2048}
    family = find_family(checkpoint(config))
    assert family is not None
    assert family.name == "deepseek_v32"


def test_a_model_type_can_be_forced() -> None:
    family = find_family(
        checkpoint({"model_type": "joyai", "num_hidden_layers": 40}), "DeepSeek_V3"
    )
    assert family is not None
    assert family.name == "deepseek_v3"


def test_a_forced_model_type_must_exist() -> None:
    with pytest.raises(UnsupportedFamily, match="no family is called 'phi9'"):
        find_family(checkpoint(DEEPSEEK), "phi9")


def test_an_unknown_model_says_what_its_tensors_look_like() -> None:
    model = checkpoint({"model_type": "phi9"}, "mtp.fc.weight")
    with pytest.raises(UnsupportedFamily, match=r"'phi9'.*look like"):
        find_head(model)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"headstart_format": 1}, "headstart"),
        ({"speculators_model_type": "mtp"}, "speculators"),
        ({"speculators_model_type": "eagle3"}, None),
        ({"model_type": "deepseek_v3_mtp"}, "xllm"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "sglang"),
        (DEEPSEEK, None),
    ],
    ids=["headstart", "speculators", "eagle3", "xllm", "sglang", "full checkpoint"],
)
def test_the_format_of_a_folder_is_told_by_its_config(
    config: dict[str, Any], expected: str | None
) -> None:
    assert format_of(checkpoint(config)) == expected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("modules.0.fuse.weight", "mtp_layers.0.input_proj.weight"),
        ("modules.0.embed_norm.weight", "mtp_layers.0.token_layernorm.weight"),
        ("modules.0.hidden_norm.weight", "mtp_layers.0.hidden_layernorm.weight"),
        ("modules.0.out_norm.weight", "mtp_layers.0.final_layernorm.weight"),
        ("modules.0.block.input_layernorm.weight", "mtp_layers.0.input_layernorm.weight"),
        ("modules.0.block.mlp.experts.down_proj", "mtp_layers.0.mlp.experts.down_proj"),
    ],
)
def test_names_of_the_speculators_format_are_those_of_its_converter(ours: str, theirs: str) -> None:
    assert _their_name(ours) == theirs
    assert _our_name(theirs) == ours


@pytest.mark.parametrize(
    "kind", ["muse_glimmer", "cohere2_moe", "solar_open", "youtu", "kimi_linear"]
)
def test_models_that_ship_no_head_have_no_family(kind: str) -> None:
    model = checkpoint({"model_type": kind, "num_nextn_predict_layers": 1})
    assert find_family(model) is None
    assert any("Do not trust the config" in text for text in pitfalls(model, None))


@pytest.mark.parametrize("kind", ["kimi_k3", "minimax_m3_vl", "qwen3"])
def test_a_head_that_no_release_has_is_not_called_lost(kind: str) -> None:
    model = checkpoint({"model_type": kind, "num_nextn_predict_layers": 1}, "lm_head.weight")
    head = find_head(model)
    assert head.state == "declared-but-missing"
    (said,) = [text for text in pitfalls(model, head) if "declares 1 module" in text]
    assert "no release of" in said and "If one was made for this model" in said


def _recurrent_layers(config: dict[str, Any]) -> int | None:
    try:
        return model_config(Config(config).fields).num_recurrent
    except UnsupportedFamily:
        return None


RECURRENT = {name: _recurrent_layers(config) for name, config in TINY_CONFIGS.items()}
WITH_HEAD = [
    name for name, count in RECURRENT.items() if count is not None and name not in GRAFTED_AS
]


@pytest.mark.parametrize("variant", WITH_HEAD)
def test_a_recurrent_state_is_reported_where_layers_keep_one(variant: str) -> None:
    config = Config(TINY_CONFIGS[variant])
    owner = find_family(checkpoint(config.raw))
    assert owner is not None
    fuse = next(name for name in owner.expected(config.fields, 1) if ".fuse" in name)
    naming = owner.naming(config.fields)
    model = checkpoint(config.raw, owner.keys.to_published(fuse, naming))
    said = [text for text in pitfalls(model, find_head(model)) if "recurrent state" in text]
    assert len(said) == bool(RECURRENT[variant])


def test_the_families_with_a_recurrent_state_are_those_known_to_have_one() -> None:
    found = {name for name, count in RECURRENT.items() if count}
    assert {"qwen4_exp", "glm5_next", "bailing_moe_v3", "nemotron_h", "qwen3_next"} <= found


def test_a_quantised_fusion_projection_is_reported() -> None:
    names = ("model.layers.61.eh_proj.weight", "model.layers.61.eh_proj.weight_scale_inv")
    tensors = {n: TensorInfo(n, "F8_E4M3", (), Path("nowhere"), 0, 0) for n in names}
    model = replace(checkpoint(DEEPSEEK), index=Index(tensors, {}, False, (), {}, {}))
    assert any("fusion projection is quantised" in t for t in pitfalls(model, find_head(model)))


def test_an_lm_head_beside_a_qwen_head_is_reported() -> None:
    config = {"model_type": "qwen3_5", "num_hidden_layers": 2, "mtp_num_hidden_layers": 1}
    model = checkpoint(config, "mtp.fc.weight", "mtp.lm_head.weight")
    said = [t for t in pitfalls(model, find_head(model)) if "engines draft with the trunk's" in t]
    assert len(said) == 1 and "mtp.lm_head.weight" in said[0]
