"""What the tests of whole engines with interpreted kernels share: small engines, few programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headstart.backends.cuda import experts
from headstart.backends.cuda.kernels import moe
from headstart.backends.cuda.kernels.linear import Shape
from headstart.engine.engine import Engine

# Interpreted programs take milliseconds each, so everything is as small as it can be.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
}  # fmt: skip
BLOCK_BYTES = 4 * 2 * 16 * 4 * 2 + 64 * 4  # of 4 tokens: K and V of two layers, and a state


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU to fill, and every program takes milliseconds."""
    for owner in (moe, experts):
        monkeypatch.setattr(owner, "PROGRAMS", 0)
    wide = Shape(outputs=128, inputs=128), Shape(outputs=64, inputs=128)
    for name in ("vector_terms", "fp8_vector_terms"):
        monkeypatch.setattr(experts, name, partial(getattr(experts, name), shapes=wide))


def start(folder: Path, kernels: str, **settings: Any) -> Engine:
    settings = {"speculate": 2, "block_size": 4, "kv_bytes": 1 << 20, **settings}
    return Engine(folder, dtype="float32", kernels=kernels, max_running_requests=2, **settings)
