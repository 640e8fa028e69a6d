"""What is around text models that engines know as a part of another model only."""

from __future__ import annotations

from typing import Any


def _with_vision(model_type: str, architecture: str) -> dict[str, Any]:
    """What is around a text model; the vision part is as small as engines take it."""
    vision = {"model_type": model_type, "depth": 1, "hidden_size": 64, "intermediate_size": 64,
              "num_heads": 1, "num_position_embeddings": 16}  # fmt: skip
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        "model_type": model_type,
        "architectures": [architecture],
        **dict.fromkeys(tokens, 0),  # no text holds the unknown word
        "vision_config": vision,
    }


# Text models that engines know as a part of another one only (vLLM up to 0.26), by model_type.
WHOLE_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _with_vision("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": _with_vision("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
