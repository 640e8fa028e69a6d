"""Decoder layers of vLLM's for heads that our own draft class runs, by family, never quantised.

A layer is called as `layer(positions, rows, residual)` and gives rows and residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

_MODELS = "vllm.model_executor.models"


@dataclass(frozen=True)
class GraftedLayer:
    """How a family's layer is made, and how its tensors are loaded."""

    make: Callable[[Any, Any, str], nn.Module]  # vLLM's config, that of the trunk, a prefix
    # vLLM's mapper of the trunk's tensors, where a layer has experts that vLLM loads by itself
    mapper: Callable[[], Any] | None = None


def _qwen3_layer(vllm_config: Any, config: Any, prefix: str) -> nn.Module:
    """The dense layer, beside a MoE trunk as well: its config has all that the layer reads."""
    layer = import_module(f"{_MODELS}.qwen3").Qwen3DecoderLayer
    made: nn.Module = layer(
        config=config, cache_config=vllm_config.cache_config, quant_config=None, prefix=prefix
    )
    return made


def _llama_layer(vllm_config: Any, config: Any, prefix: str) -> nn.Module:
    """With biases of q, k and v, as MiMo's heads have, and none of the output."""
    layer = import_module(f"{_MODELS}.llama").LlamaDecoderLayer

    class Plain(layer):  # type: ignore[misc, valid-type]
        def get_quant_config(self, vllm_config: Any) -> None:
            return None

    config.attention_bias, config.qkv_bias, config.mlp_bias = False, True, False
    config.layer_types = None  # one for each layer of the trunk; the head's comes after them
    made: nn.Module = Plain(vllm_config=vllm_config, prefix=prefix, config=config)
    return made


def _ling_layer(vllm_config: Any, config: Any, prefix: str) -> nn.Module:
    """Of Ling-2.0, with experts."""
    module = import_module(f"{_MODELS}.bailing_moe")
    trunk = module.BailingMoeModel
    if not hasattr(trunk, "embed_tokens"):
        # vLLM gives a draft the target's embedding by this name, which this trunk does not have.
        trunk.embed_tokens = property(lambda self: self.word_embeddings)

    class Ordered(module.BailingMoeBlock):  # type: ignore[misc, name-defined]
        def forward(self, positions: Tensor, rows: Tensor, residual: Tensor | None) -> Any:
            return super().forward(rows, positions, residual)

    made: nn.Module = Ordered(
        config=config, cache_config=vllm_config.cache_config, quant_config=None, prefix=prefix
    )
    return made


def _ling_mapper() -> Any:
    return import_module(f"{_MODELS}.bailing_moe").BailingMoeModel.hf_to_vllm_mapper


LAYERS: dict[str, GraftedLayer] = {
    "qwen3": GraftedLayer(_qwen3_layer),
    "qwen3_moe": GraftedLayer(_qwen3_layer),
    "mimo": GraftedLayer(_llama_layer),
    "bailing_moe": GraftedLayer(_ling_layer, _ling_mapper),
}
