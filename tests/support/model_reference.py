"""What the model tests share: random models of transformers, and a paged cache by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes
from headstart.models.attention import PagedContext, Span, empty_cache
from headstart.models.build import LoadedModel
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config
from headstart.models.loading import load_trunk
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import SlotRecurrence, StateSpan, empty_states
from headstart.models.trunk import Trunk

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

_ATTENTION = ("full_attention", "sliding_attention")


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random, norms and biases too: a forgotten one then shows."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = 1 + 0.3 * noise if "norm" in name else 0.25 * noise
        parameter.requires_grad_(False)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "correction")):
            buffer.copy_(0.25 * torch.randn(buffer.shape, generator=draw))
    return model


def transformers_model(raw: Mapping[str, Any], seed: int = 0) -> Any:
    """The published implementation of a config, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in raw.items() if name != "model_type"}
    if raw["model_type"] == "mimo_v2_flash":
        fields = _mimo_v2(fields)
    kind = "qwen2" if raw["model_type"] == "mimo" else raw["model_type"]
    if "index_topk" in raw and kind == "deepseek_v3":
        kind = "deepseek_v32"
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomised(model.eval(), seed)


def _mimo_v2(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields that transformers spells in its own way."""
    part = {"rope_type": "default", "partial_rotary_factor": raw["partial_rotary_factor"]}
    return {
        **{name: value for name, value in raw.items() if not name.startswith(("swa_", "rope_"))},
        "layer_types": [_ATTENTION[n] for n in raw["hybrid_layer_pattern"]],
        "mlp_layer_types": [("dense", "sparse")[n] for n in raw["moe_layer_freq"]],
        "rope_parameters": {
            "full_attention": {**part, "rope_theta": raw["rope_theta"]},
            "sliding_attention": {**part, "rope_theta": raw["swa_rope_theta"]},
        },
    }


def sources(tensors: Mapping[str, Tensor]) -> dict[str, TensorSource]:
    """Tensors as a checkpoint would give them."""

    def source(tensor: Tensor) -> TensorSource:
        kind = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}[tensor.dtype]
        kept = tensor.detach().contiguous()
        return TensorSource(kind, tuple(kept.shape), lambda: (as_bytes(kept),), is_copy=False)

    return {name: source(tensor) for name, tensor in tensors.items()}


def published(model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Weights under the names of releases; experts stay fused, as transformers has them."""
    state = {
        name.replace("mlp.gate.moe_statics.", "mlp.moe_statics.").replace(
            "self_attn.sinks", "self_attn.attention_sink_bias"
        ): value
        for name, value in model.state_dict().items()
    }
    if config.is_tied:
        state.pop("lm_head.weight", None)
    return state


def our_trunk(raw: Mapping[str, Any], model: nn.Module, dtype: torch.dtype) -> Trunk:
    """The same weights in our modules."""
    config = model_config(raw)
    trunk = Trunk(config, config.max_positions, dtype).to(dtype)
    load_trunk(trunk, sources(published(model, config)))
    return trunk


def hand_made(trunk: Trunk, head: MTPHead | None = None) -> LoadedModel:
    """Modules as if they had been loaded; there is no checkpoint behind them."""
    return LoadedModel(
        checkpoint=None,
        config=trunk.config, trunk=trunk, head=head, dtype=trunk.embed.dtype,
        device=trunk.embed.device, max_len=trunk.config.max_positions, notes=(),
    )  # fmt: skip


class PagedRun:
    """Several texts through a trunk, in chunks, their blocks scattered over one memory."""

    def __init__(self, trunk: Trunk, num_texts: int, *, block_size: int, max_len: int = 64):
        self.trunk, self._size = trunk, block_size
        per_text = -(-max_len // block_size)
        order = torch.randperm(
            num_texts * per_text, generator=torch.Generator().manual_seed(block_size)
        )
        self._tables = order.view(num_texts, per_text)
        config = trunk.config
        dtype, device = trunk.embed.dtype, torch.device("cpu")
        slots = num_texts * per_text * block_size
        self._caches = [
            empty_cache(config.kept(kind), slots, dtype, device) for kind in config.layers
        ]
        self._done = [0] * num_texts
        self._states = [
            None
            if (own := config.recurrent) is None
            else empty_states(own, num_texts, dtype, device, config.more_states(kind))
            for kind in config.layers
        ]

    def step(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """The next tokens of some texts in one batch; logits of every row."""
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        for text, chunk in chunks.items():
            start, begin = self._done[text], len(ids)
            stop = start + len(chunk)
            spans.append(
                Span(begin, begin + len(chunk), self._places(text, start, stop),
                     self._places(text, 0, stop))
            )  # fmt: skip
            ids += chunk
            positions += range(start, stop)
            self._done[text] = stop
        states = [
            StateSpan(s.start, s.stop, text if self._done[text] > s.num_rows else None,
                      ((s.num_rows, text),))
            for text, s in zip(chunks, spans, strict=True)
        ]  # fmt: skip
        contexts = [
            PagedContext(cache, spans) if not kind.is_recurrent or own is None
            else SlotRecurrence(own, states)
            for kind, cache, own in zip(
                self.trunk.config.layers, self._caches, self._states, strict=True
            )
        ]  # fmt: skip
        stream = self.trunk(torch.tensor(ids), torch.tensor(positions), contexts)
        logits = self.trunk.logits(self.trunk.final_norm(stream))
        return {
            text: logits[span.start : span.stop] for text, span in zip(chunks, spans, strict=True)
        }

    def _places(self, text: int, start: int, stop: int) -> Tensor:
        slots = torch.arange(start, stop)
        return self._tables[text][slots // self._size] * self._size + slots % self._size


def in_steps(
    run: PagedRun, texts: Sequence[list[int]], steps: Iterable[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits of each text, read beside the others; `steps` say how many rows of each come next."""
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    at = [0] * len(texts)
    for sizes in steps:
        step = {}
        for which, size in enumerate(sizes):
            if size:
                step[which] = texts[which][at[which] : at[which] + size]
                at[which] += size
        for which, logits in run.step(step).items():
            rows[which].append(logits)
    assert at == [len(text) for text in texts]
    return [torch.cat(found) for found in rows]
