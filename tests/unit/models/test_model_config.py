"""What a config asks for is computed as transformers computes it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from support.model_reference import SMALL

from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.config import Config
from headstart.errors import BadConfig, UnsupportedFamily
from headstart.models.config_reader import model_config

QWEN: dict[str, Any] = {**SMALL, "model_type": "qwen2"}
SLIDING = "sliding_attention"
FULL = "full_attention"


def test_a_null_epsilon_is_the_default_of_mellum() -> None:
    raw = Config(TINY_CONFIGS["mellum"]).fields
    assert model_config({**raw, "rms_norm_eps": None}).eps == 1e-6


def windows(**fields: Any) -> tuple[int | None, ...]:
    return model_config({**QWEN, **fields}).windows


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 4}, (None, None, None)),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, (None, 4, 4)),
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ({"sliding_window": 4, "use_sliding_window": True, "layer_types": [FULL, SLIDING, FULL]},
         (None, 4, None)),
        ({"sliding_window": 4, "layer_types": [FULL] * 3}, (None, None, None)),
    ],
    ids=["none", "switched off", "above", "default size", "by layer", "off by layer"],
)  # fmt: skip
def test_windows_are_those_of_transformers(
    fields: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    from transformers import Qwen2Config

    assert windows(**fields) == expected
    config = Qwen2Config(**{name: value for name, value in {**SMALL, **fields}.items()})
    theirs = [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]
    assert tuple(theirs) == expected


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"layer_types": [FULL] * 2}, BadConfig, "layer_types has 2 entries; expected one for eac"),
        ({"layer_types": ["chunked_attention", "linear_attention", FULL]}, UnsupportedFamily,
         "layer_types holds chunked_attention, linear_attention; the engine computes full_att"),
        ({"layer_types": [SLIDING] * 3, "use_sliding_window": True, "sliding_window": None},
         BadConfig, "gives no window: sliding_window is None, use_sliding_window True"),
        ({"layer_types": [SLIDING] * 3, "use_sliding_window": False, "sliding_window": 4},
         BadConfig, "gives no window: sliding_window is 4, use_sliding_window False"),
        ({"model_type": "llama", "layer_types": [SLIDING] * 3, "sliding_window": 4},
         UnsupportedFamily, "layer_types holds sliding_attention.*full_attention for llama"),
    ],
    ids=["short list", "unknown kinds", "no size", "switched off", "llama"],
)  # fmt: skip
def test_windows_that_cannot_be_meant_are_refused(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        windows(**fields)


@pytest.mark.parametrize(
    "name",
    ["num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"],
)
def test_a_missing_size_is_named(name: str) -> None:
    """Regression: this was a KeyError."""
    raw = {key: value for key, value in QWEN.items() if key not in (name, "head_dim")}
    with pytest.raises(BadConfig, match=rf"config\.json lacks {name}; expected a whole number"):
        model_config(raw)
    with pytest.raises(BadConfig, match=rf"has 'x' for {name}"):
        model_config({**raw, name: "x"})


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "yarn"}, "'yarn' has factor None"),
        ({"rope_type": "linear", "factor": "2"}, "'linear' has factor '2'; expected a number"),
        ({"rope_type": "llama3", "factor": 8.0}, "has original_max_position_embeddings None"),
    ],
    ids=["yarn", "linear", "llama3"],
)
def test_rotary_scaling_without_its_numbers_is_refused(scaling: dict[str, Any], words: str) -> None:
    """Regression: a missing factor was taken for 1, which is no scaling at all."""
    with pytest.raises(BadConfig, match=words):
        model_config({**QWEN, "rope_scaling": scaling})
