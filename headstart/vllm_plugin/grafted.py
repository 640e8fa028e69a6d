"""Our own draft class in vLLM: a fusion, one decoder layer of the trunk's kind, a norm.

For heads that `headstart export --format vllm` wrote for it, because no class of vLLM's fits them.
Sizes, rotation and positions are the trunk's, so they come from the target's config. The layer is
never quantised, whatever the trunk is. Embedding and LM head are the target's, put in by vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import AutoWeightsLoader

from headstart.errors import MissingTensor, UnexpectedTensor, some
from headstart.families.base import HeadLayout
from headstart.families.registry import family
from headstart.heads.formats.vllm import KEY
from headstart.vllm_plugin.grafted_layers import LAYERS

_MODULE = "modules.0."
_BLOCK = "block."
_EMBED = "embed_tokens.weight"
_NO_PLACE = "for which this model's head has no place. Export the head of this model again."
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
        self._mapper = LAYERS[owner.name].mapper
        self._expected = frozenset(owner.expected(draft.to_dict(), 1)) if self._mapper else None
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
        if self._mapper is not None:
            return self._load_by_vllm(weights, self._mapper())
        parameters = dict(self.model.named_parameters())
        loaded = set[str]()
        for name, value in weights:
            place, part = _place(name)
            parameter = parameters.get(place)
            if parameter is None or not name.startswith(_MODULE):
                raise UnexpectedTensor(f"the head holds {name}, {_NO_PLACE}")
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, value) if part is None else load(parameter, value, part)
            loaded.add(f"model.{place}")
        missing = [n for n in parameters if f"model.{n}" not in loaded and n != _EMBED]
        if missing:
            raise MissingTensor(f"the head lacks {some(missing)}. Export it again.")
        return loaded | {f"model.{_EMBED}"}  # which vLLM replaces by the target's

    def _load_by_vllm(self, weights: Iterable[tuple[str, Tensor]], mapper: Any) -> set[str]:
        """The same where experts are among them, which vLLM packs in its own way."""
        expected, given = self._expected or frozenset(), set[str]()

        def named() -> Iterable[tuple[str, Tensor]]:
            for name, value in weights:
                if name not in expected:
                    raise UnexpectedTensor(f"the head holds {name}, {_NO_PLACE}")
                given.add(name)
                yield name.removeprefix(_MODULE), value

        loaded = AutoWeightsLoader(self.model).load_weights(named(), mapper=mapper)
        if missing := sorted(expected - given):
            raise MissingTensor(f"the head lacks {some(missing)}. Export it again.")
        return {f"model.{name}" for name in loaded} | {f"model.{_EMBED}"}


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
        self.block = LAYERS[name].make(vllm_config, copy.deepcopy(config), where)
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


def _place(name: str) -> tuple[str, str | int | None]:
    """The parameter below `model` for a tensor, and which part of it the tensor is."""
    place = name.removeprefix(_MODULE)
    if place.startswith(_BLOCK):
        for part, (whole, which) in _STACKED.items():
            if f".{part}." in place:
                return place.replace(f".{part}.", f".{whole}."), which
    return place, None
