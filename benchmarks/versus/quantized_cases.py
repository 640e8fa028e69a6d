"""Quantised checkpoints that both engines are measured with, and how they are told to run them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.calibrate.calibrated import agreement_of
from headstart.calibrate.shape_config import shape_config
from versus.quick_checkpoints import write_quickly

DRAFTS, RATE, ACTIVE = 3, 0.8, 32000
PROMPT, ANSWER = 1000, 500
SPARE_TOKENS = 64
GIB = 2**30
_MIMO, _DEEPSEEK = "mimo-7b", "deepseek-v3,layers=8,experts=32,vocab=32768"


@dataclass(frozen=True)
class Case:
    """A checkpoint, how both engines are told to run it, and with how many requests at once."""

    shape: str
    weights: str | None  # the format in which it is stored
    requests: tuple[int, ...] = (1, 16)
    headstart: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)
    vllm_env: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{self.shape.partition(',')[0]}-{self.weights or 'bf16'}"

    @property
    def kv_bytes(self) -> int:
        """For all requests, in bf16, and some more."""
        config = shape_config(self.shape)
        each = 2 * config["num_key_value_heads"] * config.get("head_dim", 0)
        if "kv_lora_rank" in config:
            each = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        tokens = max(self.requests) * (PROMPT + ANSWER + SPARE_TOKENS)
        return int(1.05 * tokens * each * 2 * (config["num_hidden_layers"] + 1)) + (1 << 28)


FP8 = (1, 16, 80)
# Its next best products of blocks (CUTLASS), which are compiled already.
_NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}
CASES = {
    "fp8-row": Case(_MIMO, "fp8-row", FP8),
    "fp8-block": Case(_MIMO, "fp8-block", FP8),
    "fp8-block-cutlass": Case(_MIMO, "fp8-block", vllm_env=_NO_DEEP_GEMM),
    "awq": Case(_MIMO, "awq"),
    "gptq": Case(_MIMO, "gptq"),
    "compressed-tensors": Case(_MIMO, "compressed-tensors"),
    "moe": Case(_DEEPSEEK, "fp8-block"),
    "moe-cutlass": Case(_DEEPSEEK, "fp8-block", vllm_env=_NO_DEEP_GEMM),
    "bf16": Case(_MIMO, None, FP8),
    "fp8-online": Case(_MIMO, None, FP8, {"weights": "fp8"}, {"quantization": "fp8"}),
}


def cycle_of(model: Path) -> Path:
    """The file with what follows each token in its texts; written last."""
    return model.with_suffix(".cycle.json")


def write_checkpoint(shape: str, weights: str | None, out: Path, active: int) -> None:
    write_quickly(shape, weights, out, rate=RATE, active=active)
    cycle_of(out).write_text(json.dumps(agreement_of(out).following.tolist()))
