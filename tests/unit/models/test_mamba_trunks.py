"""Nemotron-H's trunk against transformers: Mamba layers, attention without positions, MLPs and
experts without gates, each a layer of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import SMALL, PagedRun, in_steps, randomised, sources
from torch import Tensor

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.models.config_reader import model_config
from headstart.models.delta_rule import scan
from headstart.models.loading import TrunkNames, load_trunk
from headstart.models.mamba import Mamba, MambaRows
from headstart.models.trunk import Trunk

NAMES = TrunkNames(embed="model.embeddings.weight", final_norm="model.norm_f.weight")
NEMOTRON: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in ("rope_theta", "hidden_act")},
    "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M*EM-",
    "layer_norm_epsilon": 1e-5, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7,
    "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 12, "norm_topk_prob": True,
    "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 10,
    "conv_kernel": 4, "use_conv_bias": True, "num_nextn_predict_layers": 1,
    # theirs cuts off time steps below it in prompts, and not where it decodes
    "time_step_min": 1e-30,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as released": {},
    "experts in the model's space": {"moe_latent_size": None},
    "groups of experts": {"n_group": 4, "topk_group": 2},
    "weights as they are": {"norm_topk_prob": False},
    "one group": {"n_groups": 1},
    "a group for each head": {"n_groups": 4},
    "no bias": {"use_conv_bias": False},
    "short convolution": {"conv_kernel": 2},
    "layers by name": {
        "hybrid_override_pattern": None,
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "moe",
                              "linear_attention"],
    },
}  # fmt: skip
LENGTH = 40


def text(length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=draw).tolist()


def theirs_of(raw: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, NemotronHConfig

    left_out = ("model_type", "num_hidden_layers", *(n for n, v in raw.items() if v is None))
    fields = {name: value for name, value in raw.items() if name not in left_out}
    config = NemotronHConfig(**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomised(model.eval())


def stored(model: Any) -> dict[str, Tensor]:
    """Weights as releases store them, expert by expert."""
    result = {}
    for name, value in model.state_dict().items():
        at, _, last = name.rpartition(".")
        if at.endswith("mixer.experts"):
            for expert, matrix in enumerate(value):
                result[f"{at}.{expert}.{last}.weight"] = matrix
        else:
            result[name] = value
    return result


def ours_of(raw: dict[str, Any], model: Any) -> Trunk:
    config = model_config({name: value for name, value in raw.items() if value is not None})
    trunk = Trunk(config, config.max_positions, torch.float32)
    load_trunk(trunk, sources(stored(model)), NAMES)
    return trunk


@torch.inference_mode()
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers_in_one_pass_in_chunks_and_in_a_batch(
    changes: dict[str, Any],
) -> None:
    raw = {**NEMOTRON, **changes}
    theirs = theirs_of(raw)
    trunk = ours_of(raw, theirs)
    ids, other = text(LENGTH), text(LENGTH - 11, seed=1)
    expected, expected_other = (
        theirs(torch.tensor([t]), use_cache=False).logits[0] for t in (ids, other)
    )
    whole = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    # chunks of a prompt beside single tokens, then rounds of decoding with several rows
    steps = ((26, 1), (1, 13), (1, 0), (1, 5), (1, 1), (1, 1), (4, 3), (5, 5))
    found = in_steps(PagedRun(trunk, 2, block_size=3), (ids, other), steps)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected_other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("mistake", ["D forgotten", "norm over all", "time steps as they are"])
def test_a_mistake_would_show(mistake: str) -> None:
    theirs = theirs_of(NEMOTRON)
    trunk = ours_of(NEMOTRON, theirs)
    for module in trunk.modules():
        if not isinstance(module, Mamba):
            continue
        if mistake == "D forgotten":
            module.skip.zero_()
        elif mistake == "norm over all":
            object.__setattr__(module.config, "k_heads", 1)
            object.__setattr__(module.config, "k_dim", 20)
        else:
            module.dt_bias.zero_()
    ids = text(LENGTH)
    ours = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() > 1e-2


def test_many_rows_at_once_are_row_after_row() -> None:
    """Over more rows than a chunk has, from a memory that is not empty, with steep decays."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(150, 3, n, generator=draw, dtype=torch.float64) for n in (5, 5, 7))
    decay = -torch.rand(150, 3, generator=draw, dtype=torch.float64) * 30
    rows = MambaRows(q, k, v, decay)
    memory = torch.randn(3, 5, 7, generator=draw, dtype=torch.float64)
    found, after = scan(rows, memory)
    state, each = memory[None], []
    for row in range(150):
        result, state = rows[row : row + 1].step(state)
        each.append(result)
    torch.testing.assert_close(found, torch.cat(each), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(after, state[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hybrid_override_pattern": "M*E"}, BadConfig, "pattern has 3 entries, fewer than"),
        ({"hybrid_override_pattern": "M*EMX"}, BadConfig, "names the layer kind 'X'"),
        ({"n_groups": 3}, BadConfig, "as many heads as groups or a multiple"),
        ({"mamba_num_heads": "4"}, BadConfig, "are 2, '4', 10, 6, 4; expected whole numbers"),
        ({"mlp_hidden_act": "silu"}, UnsupportedFamily, "mlp_hidden_act is 'silu'"),
        ({"use_bias": True}, UnsupportedFamily, "use_bias is true; the engine computes"),
        ({"mtp_hybrid_override_pattern": "M*E"}, UnsupportedFamily,
         "the head's layers are mamba, attention, moe; the engine runs"),
        ({"model_type": "nemotron_h_puzzle"}, UnsupportedFamily, "layers of different widths"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model_config({**NEMOTRON, **changes})
