"""Which names engines ask for, and what each quantisation method makes of a list."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.errors import BadConfig
from headstart.families.names import Naming
from headstart.families.registry import family
from headstart.heads.ignore_lists import (
    fused_lookups,
    has_list,
    is_listed,
    list_field,
    lookups,
    with_unquantized,
    without,
)

MODULE = "modules.0.block.self_attn.q_proj"
NAMING = Naming(num_layers=36)
METHODS: list[dict[str, Any]] = [
    {"quant_method": "compressed-tensors"},
    {"quant_method": "fp8"},
    {"quant_method": "awq"},
    {"quant_method": "quark"},
    {"quant_method": "modelopt"},
    {"quant_method": "modelopt_fp4"},
    {"quant_method": "gptq"},
    {"quant_method": "auto-round"},
]
IDS = [method["quant_method"] for method in METHODS]


def test_modules_are_asked_for_under_checkpoint_engine_and_fused_names() -> None:
    assert lookups(family("mimo"), NAMING, [MODULE]) == [
        "model.mtp_layers.0.self_attn.q_proj",
        "model.layers.36.self_attn.q_proj",
        "model.mtp_layers.0.self_attn.qkv_proj",
        "model.layers.36.self_attn.qkv_proj",
    ]


def test_one_engine_can_be_asked_about() -> None:
    found = lookups(family("glm4_moe"), NAMING, [MODULE], "sglang")
    assert found == ["model.decoder.self_attn.q_proj", "model.decoder.self_attn.qkv_proj"]


@pytest.mark.parametrize("name", ["mimo", "qwen3_next", "minimax_m3"])
def test_names_of_trunk_layers_are_never_given(name: str) -> None:
    found = lookups(family(name), NAMING, ["modules.0.block.mlp.down_proj"])
    assert "mlp.down_proj" not in found
    assert not [n for n in found if n.startswith("model.layers.0.")]


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("a.self_attn.k_proj", ["a.self_attn.qkv_proj"]),
        ("a.mlp.up_proj", ["a.mlp.gate_up_proj"]),
        ("a.kv_a_proj_with_mqa", ["a.fused_qkv_a_proj", "a.fused_qkv_a_proj_with_mqa"]),
        ("a.mlp.experts.7.gate_proj", ["a.mlp.experts"]),
        ("a.shared_experts.w1", ["a.shared_experts.gate_up_proj"]),
        ("a.self_attn.o_proj", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fused_names_stand_for_their_parts(name: str, fused: list[str]) -> None:
    assert fused_lookups(name) == fused


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_what_was_excluded_is_found_excluded(method: dict[str, Any]) -> None:
    assert not is_listed(method, "mtp.fc")
    changed = with_unquantized(method, ["mtp.fc"])
    assert is_listed(changed, "mtp.fc")
    assert not is_listed(changed, "model.layers.0.mlp.fc")


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_exclusion_can_be_taken_back(method: dict[str, Any]) -> None:
    changed = without(with_unquantized(method, ["mtp.fc", "mtp.norm"]), ["mtp.fc"])
    assert not is_listed(changed, "mtp.fc")
    assert is_listed(changed, "mtp.norm")


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_the_given_config_is_not_changed(method: dict[str, Any]) -> None:
    before = dict(method)
    with_unquantized(method, ["mtp.fc"])
    assert method == before


def test_the_list_that_vllm_reads_first_is_used() -> None:
    method = {"quant_method": "fp8", "ignored_layers": [], "modules_to_not_convert": []}
    assert list_field(method) == "ignored_layers"


def test_a_method_without_a_known_list_is_left_alone() -> None:
    method = {"quant_method": "vptq"}
    assert not has_list(method)
    assert with_unquantized(method, ["mtp.fc"]) == method


@pytest.mark.parametrize(
    ("method", "entry", "name", "expected"),
    [
        ("compressed-tensors", "re:^mtp.*", "mtp.layers.0.mlp.down_proj", True),
        ("compressed-tensors", "re:mtp", "model.mtp.fc", False),  # anchored at the start
        ("compressed-tensors", "mtp", "mtp.fc", False),
        ("compressed-tensors", "a.qkv_proj", "a.k_proj", True),
        ("fp8", "mtp", "mtp.fc", False),
        ("awq", "mtp", "model.mtp.fc", True),
        ("modelopt", "mtp*", "mtp.fc", True),
    ],
)
def test_entries_match_as_engines_match_them(
    method: str, entry: str, name: str, expected: bool
) -> None:
    field = list_field({"quant_method": method})
    assert field is not None
    assert is_listed({"quant_method": method, field: [entry]}, name) is expected


def test_gptq_rules_skip_by_pattern() -> None:
    method = {"quant_method": "gptq", "dynamic": {"-:.*mtp.*": {}, "+:.*fc.*": {"bits": 8}}}
    assert is_listed(method, "mtp.layers.0.mlp.down_proj")
    assert not is_listed(method, "model.fc")


def test_gptq_rules_may_be_null() -> None:
    """GPTQModel writes null where there are none."""
    changed = with_unquantized({"quant_method": "gptq", "dynamic": None}, ["mtp.fc"])
    assert is_listed(changed, "mtp.fc")


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "compressed-tensors", "ignore": ["re:([a-z0-9._]+)+!"]},
        {"quant_method": "gptq", "dynamic": {"-:([a-z0-9._]+)+!": {}}},
    ],
    ids=["list", "rules"],
)
def test_a_pattern_that_would_never_end_is_refused(method: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="a repetition inside of a repeated group"):
        is_listed(method, "model.layers.61.mlp.experts.120.gate_proj")


def test_autoround_says_by_settings_and_blocks_what_is_plain() -> None:
    """vLLM asks for a name, then for the ends of names, then for patterns."""
    own: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "extra_config": {
        "model.layers.3.mlp.gate": {"bits": 16}, "model.layers.4.mlp.down_proj": {"bits": 8},
        "lm_head": {"bits": 16}, ".*shared_expert_gate.*": {"bits": 16},
    }}  # fmt: skip
    plain = ["model.layers.3.mlp.gate", "model.lm_head", "model.layers.1.mlp.shared_expert_gate"]
    assert all(is_listed(own, name) for name in plain)
    assert not is_listed(own, "model.layers.4.mlp.down_proj")
    assert not is_listed(own, "model.layers.5.mlp.down_proj")
    own["block_name_to_quantize"] = "model.layers,model.visual"
    assert is_listed(own, "mtp.layers.0.mlp.down_proj")
    assert not is_listed(own, "model.layers.5.mlp.down_proj")
