"""Llama, Qwen2 and Mistral: trunks that the engine runs and for which no head is published.

`headstart graft` gives them a head in the layout of a family, which engines serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.errors import UnsupportedFamily
from headstart.families.dims import Fields
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


def _without_window(fields: Fields) -> Fields:
    """Mistral slides over 4096 tokens where its config is silent, and never where it says null."""
    window, longest = fields.get("sliding_window", 4096), fields["max_position_embeddings"]
    if isinstance(window, int) and isinstance(longest, int) and window < longest:
        raise UnsupportedFamily(
            f"this Mistral attends to the last {window} of {longest} tokens (sliding_window); "
            "grafted heads have no window. Releases from 7B v0.2 on, whose config says null, "
            "are taken."
        )
    return {}


MISTRAL = PlainTrunk(
    model_type="mistral",
    grafted_as="mimo",
    runtime=Runtime(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
        },
        fixed={"attention_bias": False},
        normalise=_without_window,
        has_windows=False,
    ),
)
