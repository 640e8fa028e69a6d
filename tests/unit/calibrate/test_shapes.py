from __future__ import annotations

from math import prod

import pytest

from headstart.calibrate.shape_config import released, shape_config
from headstart.calibrate.shapes import SHAPES
from headstart.calibrate.tensors import trunk_shapes
from headstart.errors import ConfigError
from headstart.families.registry import family
from headstart.models.config_reader import model_config

SMALL = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "vocab": 32}


def shape(**changes: int) -> str:
    return ",".join(f"{name}={value}" for name, value in {**SMALL, **changes}.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 63, "head_dim": 16}, "hidden is 63; expected an even number"),
        ({"heads": 12, "head_dim": 15}, "head_dim is 15; expected an even number"),
        ({"hidden": 60}, "head_dim is 15; expected an even number"),
        ({"kv_heads": 3}, "heads is 4 and kv_heads 3; expected a multiple"),
        ({"kv_heads": 8}, "heads is 4 and kv_heads 8; expected a multiple"),
        ({"hidden": 66}, "hidden is 66 and heads 4; expected a multiple"),
        ({"vocab": 9}, "vocab is 9; expected 10 or more"),
    ],
    ids=["hidden", "head_dim", "head_dim by division", "groups", "too many", "divide", "vocab"],
)
def test_numbers_that_make_no_model_are_refused_each_by_name(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"--shape: {message}"):
        shape_config(shape(**changes))


def test_hidden_need_not_divide_by_heads_when_head_dim_is_given() -> None:
    assert shape_config(shape(hidden=66, head_dim=16))["head_dim"] == 16
    assert shape_config(shape())["head_dim"] == 16
    assert shape_config(shape(vocab=10))["vocab_size"] == 10


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_keep_the_rules_for_numbers(name: str) -> None:
    sizes = shape_config(name)
    rotated = sizes.get("head_dim", sizes.get("qk_rope_head_dim"))
    assert sizes["hidden_size"] % 2 == 0 and rotated % 2 == 0
    assert sizes["num_attention_heads"] % sizes["num_key_value_heads"] == 0


@pytest.mark.parametrize(
    ("name", "billions"),
    # as published; embedding and LM head of ERNIE are one matrix in the release, two here
    [
        ("glm-4.5-air", 106.9),
        ("ernie-4.5-21b", 21.8 + 0.26),
        ("qwen3-next-80b", 80),
        ("qwen3.5-27b", 27),
        ("qwen3.5-35b", 35),
        ("deepseek-v3", 671),
        ("glm-4.7-flash", 30),
        ("glm-5", 744),
        ("mimo-v2-flash", 309),
        ("step-3.5-flash", 196.8),
        ("nemotron-3-super", 120.6),
        ("k-exaone-236b", 236.57),
        ("exaone-4.5-33b", 32.53),  # without the vision part
    ],
)
def test_shapes_beyond_dense_have_the_published_number_of_parameters(
    name: str, billions: float
) -> None:
    fields = shape_config(name)
    shapes = trunk_shapes(family(fields["model_type"].removesuffix("_text")), fields)
    assert sum(prod(shape) for shape in shapes.values()) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_is_one_that_the_engine_runs_with_fewer_layers_too(name: str) -> None:
    assert model_config(shape_config(name)).num_layers > 6
    fewer = model_config(shape_config(f"{name},layers=6"))
    whole = model_config(shape_config(name))
    assert fewer.layers == whole.layers[:6] and fewer.head_layer == whole.head_layer


def test_numbers_of_a_named_shape_may_be_changed() -> None:
    whole, part = shape_config("glm-4.5-air"), shape_config("glm-4.5-air,layers=8,vocab=1000")
    assert {n for n in whole if whole[n] != part[n]} == {"num_hidden_layers", "vocab_size"}
    fewer = shape_config("deepseek-v3,heads=16,experts=32")
    changed = {"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 32}
    assert fewer == {**shape_config("deepseek-v3"), **changed}
    with pytest.raises(ConfigError, match="'head_dim=8' is not one of layers"):
        shape_config("deepseek-v3,head_dim=8")
    with pytest.raises(ConfigError, match="'speed=2' is not one of layers"):
        shape_config("glm-4.5-air,speed=2")
    with pytest.raises(ConfigError, match="vocab is 9"):
        shape_config("mimo-7b,vocab=9")


@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3.5-35b"])
def test_text_models_are_released_inside_of_another_config(name: str) -> None:
    """As vLLM 0.26 and transformers look for them; everything of the text model is kept."""
    from transformers import AutoConfig

    own = shape_config(f"{name},layers=4,hidden=64,vocab=100")
    whole = released(own)
    kind = whole.pop("model_type")
    read = AutoConfig.for_model(kind, **whole)
    assert read.text_config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert read.text_config.vocab_size == 100 and read.vision_config.out_hidden_size == 64
    assert whole["text_config"] == {n: v for n, v in own.items() if n != "architectures"}
    assert whole["architectures"] == [
        type(read).__name__.replace("Config", "ForConditionalGeneration")
    ]
    assert released(shape_config("mimo-7b")) == shape_config("mimo-7b"), (
        "which are whole themselves"
    )
