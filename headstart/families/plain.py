"""Llama and Qwen2: trunks that the engine runs and for which no head is published.

`headstart graft` gives them a head in the layout of a family, which engines serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.families.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class PlainTrunk:
    model_type: str
    grafted_as: str  # the family whose layout it takes; that one's tables describe it
    runtime: Runtime


LLAMA = PlainTrunk(
    model_type="llama",
    grafted_as="mimo",
    runtime=Runtime(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        output_bias=True,
        has_windows=False,
    ),
)

QWEN2 = PlainTrunk(
    model_type="qwen2",
    grafted_as="mimo",
    runtime=Runtime(
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
        fixed={"attention_bias": True},
    ),
)
