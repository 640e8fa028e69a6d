"""EXAONE's trunks against transformers: windows that rotate beside layers that see everything and
do not, experts, and norms behind the parts of a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import (
    SMALL,
    PagedRun,
    in_steps,
    sources,
    transformers_model,
)

from headstart.errors import UnsupportedFamily
from headstart.models.config_reader import model_config
from headstart.models.loading import load_trunk
from headstart.models.trunk import Trunk

S, F = "sliding_attention", "full_attention"
_COMMON: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "rope_theta"},
    "num_hidden_layers": 4, "layer_types": [S, F, S, S], "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_nextn_predict_layers": 1, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {
    **_COMMON, "model_type": "exaone_moe", "num_experts": 8, "num_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "routed_scaling_factor": 1.7, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
POST = {**_COMMON, "model_type": "exaone4"}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 2.0, "low_freq_factor": 1.0,
    "high_freq_factor": 32.0, "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "experts": MOE,
    "experts, groups": {**MOE, "n_group": 4, "topk_group": 2},
    "experts, listed": {**MOE, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
    "experts, two shared": {**MOE, "num_shared_experts": 2},
    "norms behind": POST,
    "norms behind, by a pattern": {**POST, "layer_types": None, "sliding_window_pattern": 2},
    "norms behind, stretched": {**POST, "rope_parameters": LLAMA3},
    "norms behind, no windows": {**POST, "layer_types": [F] * 4, "sliding_window": None},
}
LENGTH = 40
IDS, OTHER = (
    torch.randint(0, SMALL["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (LENGTH, LENGTH - 11)
)


def both(raw: dict[str, Any]) -> tuple[Any, Trunk]:
    given = {name: value for name, value in raw.items() if value is not None}
    if raw["sliding_window"] is None:  # their class has a default
        theirs = transformers_model({**given, "sliding_window": None})
    else:
        theirs = transformers_model(given)
    config = model_config(given | ({"sliding_window": 0} if not raw["sliding_window"] else {}))
    trunk = Trunk(config, config.max_positions, torch.float32)
    stored = {
        name.replace("mlp.gate.e_score", "mlp.e_score"): value
        for name, value in theirs.state_dict().items()
    }
    load_trunk(trunk, sources(stored))
    return theirs, trunk


@torch.inference_mode()
@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers(raw: dict[str, Any]) -> None:
    theirs, trunk = both(raw)
    expected, expected_other = (
        theirs(torch.tensor([ids]), use_cache=False).logits[0] for ids in (IDS, OTHER)
    )
    whole = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    steps = ((26, 1), (1, 13), (1, 0), (1, 5), (1, 1), (1, 1), (4, 3), (5, 5))
    found = in_steps(PagedRun(trunk, 2, block_size=3), (IDS, OTHER), steps)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected_other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_layer_that_rotates_and_should_not_would_show() -> None:
    theirs, trunk = both(MOE)
    assert trunk.sliding_rotary is not None and trunk.rotary.cos.shape[1] == 0
    trunk.rotary = trunk.sliding_rotary
    found = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    assert (found - theirs(torch.tensor([IDS])).logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_windows": [5, 0, 7, 5]}, r"windows of 5, 7 tokens are given beside"),
        ({"mtp_layer_types": [S], "mtp_sliding_windows": [9]}, r"windows of 9 tokens are given"),
        ({"swiglu_limits": [0.0, 7.0, 7.0, 7.0]}, "swiglu_limits are given"),
        ({"attention_bias": True}, "attention_bias is true; the engine computes EXAONE"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedFamily, match=words):
        model_config({**MOE, **changes})


def test_exaone_4_0_has_no_head_and_is_not_taken_for_4_5() -> None:
    without = {name: value for name, value in POST.items() if name != "num_nextn_predict_layers"}
    with pytest.raises(UnsupportedFamily, match="does not run model_type 'exaone4'"):
        model_config(without)


def test_the_heads_block_attends_as_its_family_says() -> None:
    assert model_config(MOE).head_layer.mixer == "sliding", "as the first layer of the trunk"
    full = model_config({**MOE, "mtp_layer_types": [F]})
    assert full.head_layer.mixer == "attention" and full.rope.dim == 0 < full.rope_of_head.dim
    head = model_config(POST).head_layer
    assert (head.mixer, head.norms) == ("sliding", "after")
