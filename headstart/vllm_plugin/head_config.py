"""The config class of heads that our own class runs: the trunk's fields, under a type of vLLM's."""

from __future__ import annotations

from transformers import PretrainedConfig


class HeadConfig(PretrainedConfig):  # type: ignore[misc]
    """Whatever config.json says; vLLM has no rule that would rewrite this type."""

    model_type = "mtp"
