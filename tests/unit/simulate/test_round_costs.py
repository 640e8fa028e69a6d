"""Costs from bytes, and the K they make best."""

from __future__ import annotations

import pytest

from headstart.errors import ConfigError
from headstart.models.config_reader import model_config
from headstart.simulate.cost import CostTable, best, from_bandwidth, predict

MIMO_7B = model_config(
    {
        "model_type": "mimo", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151680, "rms_norm_eps": 1e-5, "rope_theta": 640000,
        "max_position_embeddings": 32768,
    }
)  # fmt: skip
A10 = 600e9


def test_bytes_read_give_the_published_times_of_mimo_7b() -> None:
    """26 ms a trunk pass, 0.70 ms a head's layer, 2.07 ms the LM head, 0.45 ms one of 32k."""
    whole = from_bandwidth(MIMO_7B, bytes_per_weight=2, bandwidth=A10)
    assert whole.trunk == pytest.approx(0.024, rel=0.1)
    assert whole.draft == pytest.approx(0.00070 + 0.00207, rel=0.05)
    pruned = from_bandwidth(MIMO_7B, bytes_per_weight=2, bandwidth=A10, draft_tokens=32768)
    assert pruned.draft == pytest.approx(0.00070 + 0.00045, rel=0.05)
    assert pruned.trunk == whole.trunk
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"bandwidth is {wrong:g}"):
            from_bandwidth(MIMO_7B, bytes_per_weight=2, bandwidth=wrong)


def test_an_lm_head_and_drafts_may_have_bytes_of_their_own() -> None:
    """`--weights fp8` leaves the LM head that decides in bf16; drafts read 8 bits."""
    plain, small = (from_bandwidth(MIMO_7B, bytes_per_weight=n, bandwidth=A10) for n in (2, 1))
    mixed = from_bandwidth(
        MIMO_7B, bytes_per_weight=1, bandwidth=A10, lm_head_bytes=2, draft_bytes=0.5
    )
    lm_head = MIMO_7B.vocab * MIMO_7B.hidden / A10
    assert mixed.trunk == pytest.approx(small.trunk + lm_head)
    assert mixed.draft == pytest.approx(plain.draft / 4)


def test_the_best_k_weighs_tokens_against_time() -> None:
    lengths = [1.0, 1.8, 2.3, 2.5, 2.52]
    cheap = predict(lengths, CostTable(10.0, 0.1))
    assert best(cheap).drafts == 3  # the fourth draft brings less than it costs
    assert cheap[3].speed_up == pytest.approx(2.5 * 10 / 10.3)
    assert cheap[3].speed_up_interval is None
    around = predict(lengths, CostTable(10.0, 0.1), intervals=[(n - 0.1, n + 0.2) for n in lengths])
    assert around[3].speed_up_interval == pytest.approx((2.4 * 10 / 10.3, 2.7 * 10 / 10.3))
    dear = predict(lengths, CostTable(10.0, 9.0))
    assert (best(dear).drafts, best(dear).speed_up) == (0, 1.0)


# 106 billion parameters, 12 billion of them in use for a token
GLM_AIR = model_config(
    {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151552, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "attention_bias": True, "max_position_embeddings": 131072,
    }
)  # fmt: skip


def test_rows_that_choose_their_own_experts_read_more_of_them() -> None:
    costs = from_bandwidth(GLM_AIR, bytes_per_weight=1, bandwidth=1e9)
    assert costs.round_seconds(1, 0) == pytest.approx(12, rel=0.1)
    assert costs.round_seconds(10_000, 0) == pytest.approx(106, rel=0.02)
    one, four = (costs.round_seconds(1, drafts) for drafts in (0, 3))
    # Four rows read nearly four times the experts: verifying is not free as it is when dense.
    dense = from_bandwidth(MIMO_7B, bytes_per_weight=1, bandwidth=1e9)
    assert four / one > 2 > dense.round_seconds(1, 3) / dense.round_seconds(1, 0)


def test_all_weights_of_a_hybrid_model_are_counted() -> None:
    """Qwen3-Next: 80 billion parameters, 3 billion of them in use for a token."""
    fields = {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25, "max_position_embeddings": 262144,
    }  # fmt: skip
    costs = from_bandwidth(model_config(fields), bytes_per_weight=1, bandwidth=1e9)
    assert costs.round_seconds(1, 0) == pytest.approx(3, rel=0.2)
    embedding = 151936 * 2048 / 1e9  # looked up, not read
    assert costs.round_seconds(100_000, 0) + embedding == pytest.approx(79.7, rel=0.01)
