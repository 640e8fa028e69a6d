from __future__ import annotations

import pytest

from headstart.calibrate.shapes import SHAPES, shape_config
from headstart.errors import ConfigError

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
    assert sizes["hidden_size"] % 2 == 0 and sizes["head_dim"] % 2 == 0
    assert sizes["num_attention_heads"] % sizes["num_key_value_heads"] == 0
