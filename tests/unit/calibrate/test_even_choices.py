"""Rows of a calibrated checkpoint choose experts as if by chance: many rows read nearly all."""

from __future__ import annotations

import pytest
import torch

from headstart.calibrate.shape_config import shape_config
from headstart.calibrate.tensors import EXACT, calibrated_tensors
from headstart.checkpoint.source import TensorSource

SMALL = "layers=2,hidden=128,intermediate=64,vocab=64"
ROWS = 64


def values(source: TensorSource) -> torch.Tensor:
    kind = torch.float32 if source.dtype == "F32" else torch.bfloat16
    content = b"".join(bytes(piece) for piece in source.pieces())  # type: ignore[arg-type]
    return torch.frombuffer(bytearray(content), dtype=kind).float().view(source.shape)


@pytest.mark.parametrize(
    ("shape", "router", "bias", "scores"),
    [
        (f"ernie-4.5-21b,{SMALL},heads=2,kv_heads=1,head_dim=16", "mlp.gate.weight",
         "mlp.moe_statics.e_score_correction_bias", lambda logits: logits.softmax(1)),
        (f"glm-4.5-air,{SMALL},heads=2,kv_heads=1,head_dim=16", "mlp.gate.weight",
         "mlp.gate.e_score_correction_bias", torch.sigmoid),
    ],
    ids=["softmax", "sigmoid"],
)  # fmt: skip
def test_many_rows_choose_nearly_all_experts(
    shape: str, router: str, bias: str, scores: object
) -> None:
    config = shape_config(shape)
    tensors = calibrated_tensors(config, rate=0.8, seed=0, dtype="BF16", disturbance=EXACT)
    weight, own = (values(tensors[f"model.layers.1.{name}"]) for name in (router, bias))
    rows = torch.randn(ROWS, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    assert callable(scores)
    top_k = config.get("moe_k") or config["num_experts_per_tok"]
    chosen = (scores(rows @ weight.T) + own.flatten()).topk(top_k, 1).indices
    experts, share = len(weight), top_k / len(weight)
    assert own.any()
    assert len(chosen.unique()) > 0.93 * experts * (1 - (1 - share) ** ROWS)
