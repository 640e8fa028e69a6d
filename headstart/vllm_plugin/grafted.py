"""Our own draft class in vLLM: a fusion, one decoder layer of the trunk's kind, a norm.

For heads that `headstart export --format vllm` wrote for it, because no class of vLLM's fits them.
Sizes, rotation and positions are the trunk's, so they come from the target's config. The layer is
never quantised, whatever the trunk is. Embedding and LM head are the target's, put in by vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from headstart.errors import MissingTensor, UnexpectedTensor, some
from headstart.families.base import HeadLayout
from headstart.families.registry import family
from headstart.heads.formats.vllm import KEY

_MODULE = "modules.0."
_BLOCK = "block."
_EMBED = "embed_tokens.weight"
# part of the block -> the parameter of vLLM's that holds it, and which of its parts it is
_STACKED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class HeadstartMTP(nn.Module):
    """What vLLM asks of a draft of method `mtp`: forward, compute_logits, load_weights."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        draft = vllm_config.speculative_config.draft_model_config.hf_config
        self.config = vllm_config.model_config.hf_text_config
        owner = family(str(getattr(draft, KEY)["family"]))
        self.model = _Head(vllm_config, owner.name, owner.layout, prefix)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.model.embed_tokens(input_ids)
        return found

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> Tensor:
        """[rows, hidden]: what drafts are read from, and what the next depth takes."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        found: Tensor = self.model(inputs_embeds, positions, hidden_states)
        return found

    def compute_logits(self, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor | None:
        found: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Tensors under our own names (docs/checkpoint-format.md); all of them, and no others."""
        parameters = dict(self.model.named_parameters())
        loaded = set[str]()
        for name, value in weights:
            place, part = _place(name)
            parameter = parameters.get(place)
            if parameter is None or not name.startswith(_MODULE):
                raise UnexpectedTensor(
                    f"the head holds {name}, for which this model's head has no place. Export the "
                    "head of this model again."
                )
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, value) if part is None else load(parameter, value, part)
            loaded.add(f"model.{place}")
        missing = [n for n in parameters if f"model.{n}" not in loaded and n != _EMBED]
        if missing:
            raise MissingTensor(f"the head lacks {some(missing)}. Export it again.")
        return loaded | {f"model.{_EMBED}"}  # which vLLM replaces by the target's


class _Head(nn.Module):
    """The head itself, as our family's layout says."""

    def __init__(self, vllm_config: Any, name: str, layout: HeadLayout, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self._layout = layout
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden)
        self.embed_norm = RMSNorm(hidden, eps=epsilon)
        self.hidden_norm = RMSNorm(hidden, eps=epsilon)
        self.fuse = nn.Linear(2 * hidden, hidden, bias=False)
        # Numbered behind the trunk's layers: vLLM keeps K/V by name.
        where = f"{prefix}.layers.{config.num_hidden_layers}".lstrip(".")
        self.block = _LAYERS[name](vllm_config, copy.deepcopy(config), where)
        self.out_norm = RMSNorm(hidden, eps=epsilon)

    def forward(self, embeds: Tensor, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if self._layout.zero_embed_at_position_0:
            embeds = torch.where(positions.unsqueeze(-1) == 0, 0, embeds)
        pair = (self.embed_norm(embeds), self.hidden_norm(hidden_states))
        fused = self.fuse(
            torch.cat(pair if self._layout.fuse_order == "embed_first" else pair[::-1], dim=-1)
        )
        found, residual = self.block(positions, fused, None)
        out: Tensor = self.out_norm(found + residual)
        return out


def _qwen3_layer(vllm_config: Any, config: Any, prefix: str) -> nn.Module:
    """The dense layer, beside a MoE trunk as well: its config has all that the layer reads."""
    layer = import_module("vllm.model_executor.models.qwen3").Qwen3DecoderLayer
    made: nn.Module = layer(
        config=config, cache_config=vllm_config.cache_config, quant_config=None, prefix=prefix
    )
    return made


def _llama_layer(vllm_config: Any, config: Any, prefix: str) -> nn.Module:
    """With biases of q, k and v, as MiMo's heads have, and none of the output."""
    layer = import_module("vllm.model_executor.models.llama").LlamaDecoderLayer

    class Plain(layer):  # type: ignore[misc, valid-type]
        def get_quant_config(self, vllm_config: Any) -> None:
            return None

    config.attention_bias, config.qkv_bias, config.mlp_bias = False, True, False
    config.layer_types = None  # one for each layer of the trunk; the head's comes after them
    made: nn.Module = Plain(vllm_config=vllm_config, prefix=prefix, config=config)
    return made


# family -> its decoder layer in vLLM, without quantisation
_LAYERS = {"qwen3": _qwen3_layer, "qwen3_moe": _qwen3_layer, "mimo": _llama_layer}


def _place(name: str) -> tuple[str, str | int | None]:
    """The parameter below `model` for a tensor, and which part of it the tensor is."""
    place = name.removeprefix(_MODULE)
    if place.startswith(_BLOCK):
        for part, (whole, which) in _STACKED.items():
            if f".{part}." in place:
                return place.replace(f".{part}.", f".{whole}."), which
    return place, None
