"""Trunk and head through the compiled kernels: the same modules, each pass one call.

All rows go this way, prompts too: a token's bits then depend on the tokens before it alone, not
on how a prompt was cut, on drafts, or on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from headstart.cpu import layers as kernels
from headstart.cpu.context import LANES
from headstart.cpu.crew import CREW, new_board
from headstart.cpu.linear import PackedLinear
from headstart.models.attention import Span
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.layers import Attention, DecoderLayer
from headstart.models.mlp import MLP
from headstart.models.mtp import MTPModule
from headstart.models.norm import Norm
from headstart.models.rope import RotaryTable
from headstart.models.trunk import Trunk

Kind = TypeVar("Kind")


def why_unsupported(config: ModelConfig, kinds: Sequence[LayerKind]) -> str | None:
    """What in layers of these kinds the kernels cannot run, or None."""
    if any(kind.mixer != "attention" for kind in kinds):
        other = next(kind.mixer for kind in kinds if kind.mixer != "attention")
        return f"the model has layers with {other} attention"
    if any(kind.feed != "dense" for kind in kinds):
        return "the model has experts"
    if any(kind.limit is not None or kind.shared_limit is not None for kind in kinds):
        return "the model cuts off inner products"
    if any(window is not None for window in config.windows):
        return "the model has sliding windows"
    if config.v_dim != config.head_dim or config.v_scale != 1:
        return "the model's values have a size or a scale of their own"
    if config.gated_attention or config.head_gate:
        return "the model has gates behind attention"
    if config.qk_norm:
        return "the model norms queries and keys"
    if config.head_dim % LANES:
        return f"the model has heads of size {config.head_dim}, no multiple of {LANES}"
    if config.rope.is_interleaved:
        return "the model rotates neighbours"
    return None


@dataclass(frozen=True)
class Block:
    """Layers in the form that kernels read, with their memory."""

    layers: kernels.Layers
    caches: kernels.Caches
    width: int  # of all queries of a row
    weights: int  # how many there are

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], slots: int) -> Block:
        """The layers' own matrices become views of it: nothing is held twice."""
        attentions = [_checked(layer.attention, Attention) for layer in layers]
        feeds = [_checked(layer.mlp, MLP) for layer in layers]
        first = attentions[0]
        groups = -(-slots // LANES)
        stacked = kernels.Layers(
            attention_norm=_norms([layer.attention_norm for layer in layers]),
            qkv=_matrices([attention.qkv for attention in attentions]),
            o=_matrices([attention.o for attention in attentions]),
            mlp_norm=_norms([layer.mlp_norm for layer in layers]),
            gate_up=_matrices([feed.gate_up for feed in feeds]),
            down=_matrices([feed.down for feed in feeds]),
            eps=layers[0].attention_norm.eps,
        )
        caches = kernels.Caches(
            np.zeros((len(layers), groups, first.kv_heads, first.dim, LANES), np.float32),
            np.zeros((len(layers), slots, first.kv_heads, first.dim), np.float32),
        )
        matrices = (stacked.qkv, stacked.o, stacked.gate_up, stacked.down)
        weights = sum(part.packed.size for part in matrices)
        return cls(stacked, caches, first.heads * first.dim, weights)

    def run(self, stream: np.ndarray, seats: kernels.Seats, angles: kernels.Angles) -> None:
        """Rows [rows, hidden] through all layers, in place."""
        layers = self.layers
        both = layers.gate_up.scales.shape[1]
        widths = (layers.qkv.scales.shape[1], self.width, self.width, both)
        scratch = kernels.Scratch(*(np.empty((len(stream), n), np.float32) for n in widths))
        CREW.run(
            len(stream) * self.weights, kernels.run_layers,
            new_board(kernels.PHASES * len(self.caches.keys)), stream, scratch, layers,
            self.caches, seats, angles,
        )  # fmt: skip


def seats_of(spans: Sequence[Span], positions: Sequence[int]) -> kernels.Seats:
    """Where the rows of some requests go, and what each of them sees."""
    places = [_places(span.context) for span in spans]
    slots = [_places(span.new) for span in spans]
    begins: list[int] = []
    ends: list[int] = []
    begin = 0
    for span, seen in zip(spans, places, strict=True):
        end = begin + len(seen)
        begins += [begin] * span.num_rows
        ends += range(end - span.num_rows + 1, end + 1)
        begin = end
    return kernels.Seats(
        np.array(positions), _joined(slots), _joined(places),
        _joined([runs(seen) for seen in places]), np.array(begins), np.array(ends),
    )  # fmt: skip


def runs(places: np.ndarray) -> np.ndarray:
    """From each place on, how many follow one another: [4, 5, 9] -> [2, 1, 1]."""
    breaks = np.flatnonzero(places[1:] != places[:-1] + 1) + 1
    if not len(breaks):
        return np.arange(len(places), 0, -1)
    stops = np.append(breaks, len(places))
    return np.repeat(stops, np.diff(stops, prepend=0)) - np.arange(len(places))


def angles_of(rotary: RotaryTable) -> kernels.Angles:
    return kernels.Angles(rotary.cos.numpy(), rotary.sin.numpy())


class TrunkKernels:
    """A trunk's pass."""

    def __init__(self, trunk: Trunk, slots: int):
        self._embed, self._angles = trunk.embed, angles_of(trunk.rotary)
        self._final_norm = _FinalNorm(trunk.final_norm)
        self.block = Block.of([_checked(layer, DecoderLayer) for layer in trunk.layers], slots)

    def run(self, ids: torch.Tensor, seats: kernels.Seats) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [rows] -> the residual stream and its final norm, [rows, hidden] each."""
        stream = self._embed[ids].numpy()
        self.block.run(stream, seats, self._angles)
        return torch.from_numpy(stream), self._final_norm(stream)


class HeadKernels:
    """One module of a head."""

    def __init__(self, module: MTPModule, trunk: Trunk, slots: int):
        self._embed, self._layout = trunk.embed, module.layout
        self._angles = angles_of(module.rotary or trunk.rotary)
        norms = [module.embed_norm, module.hidden_norm]
        self._embed_first = module.layout.fuse_order == "embed_first"
        self._norms = _norms(norms if self._embed_first else norms[::-1])
        self._fuse, self._eps = _matrices([module.fuse]), module.embed_norm.eps
        self._out_norm = None if module.out_norm is None else _FinalNorm(module.out_norm)
        self.block = Block.of([module.block], slots)

    def run(
        self, ids: torch.Tensor, hidden: torch.Tensor, seats: kernels.Seats
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [rows] and hidden [rows, D] -> the state for the LM head and the recycled one."""
        embedded = self._embed[ids].numpy()
        if self._layout.zero_embed_at_position_0:
            embedded[seats.positions == 0] = 0
        parts = [embedded, hidden.contiguous().numpy()]
        first, second = parts if self._embed_first else parts[::-1]
        stream = np.empty_like(first)
        kernels.fuse(new_board(1), first, second, self._norms, self._fuse, self._eps, stream)
        self.block.run(stream, seats, self._angles)
        state = torch.from_numpy(stream)
        if self._out_norm is None:
            return state, state
        normed = self._out_norm(stream)
        return normed, normed if self._layout.recycled_hidden == "after_out_norm" else state


class _FinalNorm:
    def __init__(self, norm: Norm):
        self._weight, self._eps = norm.factor.numpy(), norm.eps

    def __call__(self, stream: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(kernels.norm_rows(stream, self._weight, self._eps))


def _places(places: slice | torch.Tensor) -> np.ndarray:
    if isinstance(places, slice):
        return np.arange(places.start, places.stop)
    return places.numpy()


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _norms(norms: Sequence[Norm]) -> np.ndarray:
    return np.stack([norm.factor.numpy() for norm in norms])


def _matrices(found: Sequence[nn.Module]) -> kernels.Matrices:
    """One kind of matrix of all layers, in one piece of memory."""
    parts = [_checked(module, PackedLinear) for module in found]
    whole = np.stack([part.weight.numpy() for part in parts])
    for part, view in zip(parts, whole, strict=True):
        part.weight = torch.from_numpy(view)
    return kernels.Matrices(
        whole,
        np.stack([part.scales.numpy() for part in parts]),
        np.stack([part.bias.numpy() for part in parts]),
        np.array([part.levels for part in parts]),
    )


def _checked(module: object, kind: type[Kind]) -> Kind:
    assert isinstance(module, kind), "others are refused"
    return module
