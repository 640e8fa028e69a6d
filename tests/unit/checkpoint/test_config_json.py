from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.checkpoint.config import Config, read_config, read_json_object
from headstart.errors import BadConfig


def written(folder: Path, content: Any) -> Path:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "config.json").write_bytes(data)
    return folder


def test_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"has no config\.json. Give the folder"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "holds a JSON list; expected an object"),
        ("x", "holds a JSON str; expected an object"),
        (None, "holds a JSON NoneType; expected an object"),
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff{}", "cannot be read as JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"a":' * 200_000, "cannot be read as JSON"),
        (b'{"a":' * 150 + b"1" + b"}" * 150, "nests more than 100 levels"),
        (b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", "nests more than 100 levels"),
    ],
    ids=["list", "string", "null", "empty", "cut", "bytes", "huge", "deep", "nested", "lists"],
)
def test_a_config_that_is_not_an_object_is_refused(
    tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(BadConfig, match=message):
        read_config(written(tmp_path, content))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_hidden_layers", "2", "a whole number from 0 to 10000"),
        ("num_hidden_layers", [2], "a whole number"),
        ("num_hidden_layers", -1, "a whole number"),
        ("num_hidden_layers", True, "a whole number"),
        ("hidden_size", 2.5, "a whole number"),
        ("hidden_size", 10**30, "a whole number"),
        ("vocab_size", float("nan"), "a whole number"),
        ("n_routed_experts", 10**9, "a whole number from 0 to 10000"),
        ("num_nextn_predict_layers", 10**6, "a whole number from 0 to 64"),
        ("first_k_dense_replace", [1], "a whole number"),
        ("moe_layer_interval", float("inf"), "a whole number"),
        ("hybrid_override_pattern", True, "a string"),
        ("model_type", 3, "a string"),
        ("architectures", "Llama", "a list of strings"),
        ("architectures", [1], "a list of strings"),
        ("text_config", [], "an object"),
        ("mtp_config", "x", "an object"),
        ("quantization_config", ["fp8"], "an object"),
        ("ngram_size", 1, "a whole number from 2 to 16"),
        ("ngram_size", 2**30, "a whole number from 2 to 16"),
        ("ngram_size", [3], "a whole number from 2 to 16"),
        ("heads_per_ngram", 2**20, "a whole number from 1 to 64"),
        ("split_ngram_parts", 2**31, "a whole number from 1 to 10000"),
        ("ple_embed_dim", [64], "a whole number"),
        ("hc_sinkhorn_iters", [1], "a whole number from 0 to 1000"),
        ("hc_sinkhorn_iters", 2**31, "a whole number from 0 to 1000"),
        ("kda_lower_bound", "x", "a number"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(
    tmp_path: Path, field: str, value: Any, expected: str
) -> None:
    with pytest.raises(BadConfig, match=rf"config\.json: {field} is .*expected {expected}"):
        read_config(written(tmp_path, {field: value}))


@pytest.mark.parametrize("part", ["text_config", "mtp_config"])
def test_nested_parts_are_checked_too(tmp_path: Path, part: str) -> None:
    folder = written(tmp_path, {part: {"num_nextn_predict_layers": "1"}})
    with pytest.raises(BadConfig, match=rf"{part}\.num_nextn_predict_layers is '1'"):
        read_config(folder)


@pytest.mark.parametrize(
    ("part", "field"), [("linear_attn_config", "gate_lower_bound"), ("mtp", "rope_theta")]
)
def test_objects_about_single_layers_are_checked_too(tmp_path: Path, part: str, field: str) -> None:
    folder = written(tmp_path, {"text_config": {part: {field: "x"}}})
    with pytest.raises(BadConfig, match=rf"text_config\.{part}\.{field} is 'x'; expected a number"):
        read_config(folder)


def test_a_long_wrong_value_is_shown_in_part(tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as raised:
        read_config(written(tmp_path, {"model_type": ["x" * 10_000]}))
    assert len(str(raised.value)) < len(str(tmp_path)) + 200


def test_nulls_and_the_empty_quantization_of_xllm_are_legal(tmp_path: Path) -> None:
    content = {"hidden_size": None, "architectures": None, "quantization_config": ""}
    assert read_config(written(tmp_path, content)).quantization == {}


def test_a_list_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    content = {"num_hidden_layers": 3, "moe_layer_freq": [0, 1]}
    with pytest.raises(BadConfig, match=r"moe_layer_freq is .*one entry for each of 3 layers"):
        read_config(written(tmp_path, content))


def test_one_size_per_layer_is_legal(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, {"head_dim": [64, 128]})).get("head_dim") == [64, 128]


def test_infinity_is_legal_because_published_configs_hold_it(tmp_path: Path) -> None:
    assert read_json_object(written(tmp_path, b'{"a": [0.0, Infinity]}') / "config.json")


def test_the_text_part_comes_before_the_top_level() -> None:
    config = Config({"a": 1, "b": 2, "model_type": "x", "text_config": {"a": 3, "b": None}})
    assert config.get("a") == 3
    assert config.get("b") == 2
    assert config.fields["b"] == 2
    assert config.model_types == ("x",)
    assert config.at("text_config.a") == 3
    assert config.at("a.b.c") is None


def test_the_quantization_may_stand_in_either_part() -> None:
    inner = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    assert Config(inner).quantization["quant_method"] == "fp8"
    assert Config({"compression_config": {"x": 1}}).quantization == {"x": 1}


def test_the_text_part_may_be_called_llm_config_where_it_counts_a_head() -> None:
    inner = {"model_type": "nemotron_h", "num_nextn_predict_layers": 1, "hidden_size": 8}
    assert Config({"model_type": "omni", "llm_config": inner}).fields["hidden_size"] == 8
    silent = {"model_type": "qwen3", "hidden_size": 8}
    assert Config({"model_type": "a vision model", "llm_config": silent}).model_types == (
        "a vision model",
    )
