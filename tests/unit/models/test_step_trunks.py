"""Step-3.5's trunk against transformers, whose text model has another file and other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import SMALL, PagedRun, randomised, sources
from torch import Tensor

from headstart.errors import UnsupportedFamily
from headstart.models.config_reader import model_config
from headstart.models.loading import load_trunk
from headstart.models.trunk import Trunk

LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
STEP: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "num_key_value_heads"},
    "model_type": "step3p5", "num_hidden_layers": 4, "num_attention_groups": 2, "head_dim": 8,
    "use_head_wise_attn_gate": True, "sliding_window": 5, "num_nextn_predict_layers": 3,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6,
        "num_attention_groups": 2, "head_dim": 8,
    },
    "layer_types": LAYERS + ["sliding_attention"] * 3, "moe_layers_enum": "1,3",
    "moe_num_experts": 8, "moe_top_k": 3, "moe_intermediate_size": 24, "share_expert_dim": 20,
    "moe_router_scaling_factor": 1.7,
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as released": {},
    "limits": {
        "swiglu_limits": [0.0, 0.3, 0.0, 0.2, 0, 0, 0],
        "swiglu_limits_shared": [0.1, 0.0, 0.0, 0.2, 0, 0, 0],
    },
    "one rotation": {"rope_theta": 1e4, "partial_rotary_factors": None},
    "full layers stretched": {"rope_scaling": LLAMA3},
}
IDS = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def their_text_model(raw: dict[str, Any]) -> tuple[Any, Tensor]:
    """Their trunk, and an LM head."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    fields = {name: value for name, value in raw.items() if name != "model_type"}
    fields["num_key_value_heads"] = fields.pop("num_attention_groups")
    fields["n_routed_experts"] = fields.pop("moe_num_experts")
    fields["num_experts_per_tok"] = fields.pop("moe_top_k")
    config = Step3p7TextConfig(**fields)
    config._attn_implementation = "eager"
    model = randomised(Step3p7TextModel(config).eval())
    draw = torch.Generator().manual_seed(9)
    return model, torch.randn(raw["vocab_size"], raw["hidden_size"], generator=draw)


def published(model: Any, lm_head: Tensor) -> dict[str, Tensor]:
    """Weights as a release stores them."""
    result = {"lm_head.weight": lm_head}
    renamed = {
        "mlp.gate.e_score_correction_bias": "moe.router_bias", "mlp.gate.weight": "moe.gate.weight",
        "mlp.experts.down_proj": "moe.down_proj.weight", "mlp.shared_experts.": "share_expert.",
    }  # fmt: skip
    for name, value in model.state_dict().items():
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        if name.endswith("mlp.experts.gate_up_proj"):
            at = "model." + name.removesuffix("mlp.experts.gate_up_proj") + "moe."
            gate, up = value.chunk(2, dim=1)
            result |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        else:
            result[f"model.{name}"] = value
    return result


def our_trunk(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Trunk:
    trunk = Trunk(model_config(raw), 64, torch.float32)
    load_trunk(trunk, sources(tensors))
    return trunk


@torch.inference_mode()
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers_whole_and_in_chunks(changes: dict[str, Any]) -> None:
    raw = {**STEP, **changes}
    model, lm_head = their_text_model(raw)
    expected = model(torch.tensor([IDS])).last_hidden_state[0] @ lm_head.T
    trunk = our_trunk(raw, published(model, lm_head))
    whole = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    run, rows, at = PagedRun(trunk, 1, block_size=3), [], 0
    for size in (13, 1, 1, 4, 12, 9):
        rows.append(run.step({0: IDS[at : at + size]})[0])
        at += size
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 6}, {"moe_router_scaling_factor": 1.0}, {"swiglu_limits": None},
     {"swiglu_limits_shared": None}, {"partial_rotary_factors": None},
     {"rope_theta": 1e4}],
    ids=str,
)  # fmt: skip
def test_an_ignored_option_would_show(change: dict[str, Any]) -> None:
    raw = {**STEP, **CASES["limits"]}
    model, lm_head = their_text_model(raw)
    expected = model(torch.tensor([IDS])).last_hidden_state[0] @ lm_head.T
    trunk = our_trunk({**raw, **change}, published(model, lm_head))
    found = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    assert (found - expected).abs().max() > 1e-2


def test_modules_of_several_kinds_are_refused() -> None:
    kinds = [*LAYERS, "sliding_attention", "full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedFamily, match="modules are full_attention and sliding_attention"):
        model_config({**STEP, "layer_types": kinds})


def test_another_gate_of_the_router_is_refused() -> None:
    with pytest.raises(UnsupportedFamily, match="scoring_func 'tanh'"):
        model_config({**STEP, "moe_router_activation": "tanh"})
