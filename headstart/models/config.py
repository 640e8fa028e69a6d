"""Sizes and options of a model: one frozen dataclass, which `config_reader.py` makes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from headstart.families.base import HeadLayout
from headstart.models.attention_config import AttentionShape
from headstart.models.compressed_config import CompressedConfig
from headstart.models.delta_config import DeltaConfig, RecurrentConfig
from headstart.models.layer_kinds import LayerKind
from headstart.models.mamba_config import MambaConfig
from headstart.models.mla_config import IndexConfig, MlaConfig
from headstart.models.moe_config import MoeConfig
from headstart.models.ngram_embedding import NgramConfig
from headstart.models.rope import RopeConfig
from headstart.models.streams import StreamConfig

__all__ = ["LayerKind", "ModelConfig"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder; sizes hold for all layers, their kinds may differ."""

    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    vocab: int
    eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_tied: bool
    max_positions: int
    windows: tuple[int | None, ...]  # per layer: how many tokens back it sees, None for all
    layers: tuple[LayerKind, ...]
    head_layer: LayerKind  # what the block of a head is
    moe: MoeConfig | None
    delta: DeltaConfig | None  # of the layers whose mixer it is
    mamba: MambaConfig | None
    mla: MlaConfig | None  # of latent attention
    compressed: CompressedConfig | None  # of layers that see far tokens as entries of windows
    index: IndexConfig | None  # of layers with K/V heads that see a choice of tokens
    sliding: AttentionShape | None  # of layers that see a window, where they have their own
    v_scale: float  # of all values
    gated_attention: bool  # whether a sigmoid of the row scales what attention gives
    head_gate: bool  # whether a sigmoid of the row scales what each head gives
    gated_mlp: bool  # silu of a gate times the rest; else the square of what is above 0
    streams: StreamConfig | None  # where there are several residual ones
    ngrams: NgramConfig | None  # of the layer that has an embedding of several tokens
    centred_norms: bool  # whether a norm's weight is 1 more than what is stored
    head_rope: RopeConfig | None  # of a head that rotates otherwise than the trunk's layers
    qkv_ranks: int  # for which a fused q, k, v is stored; 0 where none is read

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """What recurrent layers keep; a model has one kind of them."""
        return self.delta or self.mamba

    @property
    def num_recurrent(self) -> int:
        """Layers that keep a state instead of keys and values."""
        return sum(kind.is_recurrent for kind in self.layers)

    def kept(
        self, kind: LayerKind, *, index_apart: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what a layer keeps of a token: K and V, or one entry and nothing.

        `index_apart`: with an indexer's key in V's place, where it else ends the entry.
        """
        if kind.mixer == "latent":
            assert self.mla is not None
            index = self.mla.index.kept if kind.index == "own" and self.mla.index else 0
            entry = self.mla.entry
            return ((entry,), (index,)) if index_apart else ((entry + index,), (0,))
        if kind.mixer == "compressed":
            assert self.compressed is not None
            has_windows, chooses = kind.window_size > 0, kind.index == "own"
            return (self.compressed.kept(has_windows=has_windows, chooses=chooses),), (0,)
        shape = self.shape(kind)
        if kind.mixer == "indexed":
            assert self.index is not None
            return (shape.kv_heads * (shape.dim + shape.v_dim) + self.index.kept,), (0,)
        return (shape.kv_heads, shape.dim), (shape.kv_heads, shape.v_dim)

    @property
    def attended(self) -> int:
        """Numbers that heads together give for a row, in the layer where they give most."""
        shapes = [self.shape(kind) for kind in self.layers if kind.attends]
        return max((shape.heads * shape.v_dim for shape in shapes), default=0)

    def slot_values(self, kind: LayerKind) -> int:
        """Numbers that a layer keeps of a token; one that does not attend none."""
        return sum(prod(shape) for shape in self.kept(kind)) if kind.attends else 0

    @property
    def rope_of_head(self) -> RopeConfig:
        """How the block of a head rotates."""
        return self.head_rope or self.shape(self.head_layer).rope

    def more_states(self, kind: LayerKind) -> tuple[tuple[int, int], ...]:
        """Rows and channels of further states that a recurrent layer keeps."""
        if not kind.has_ngrams:
            return ()
        assert self.ngrams is not None and self.streams is not None
        return self.ngrams.kept(self.streams.count * self.hidden)

    def state_size(self, layout: HeadLayout) -> int:
        """Numbers in the state that a head with this layout is fed, and hands on."""
        streams = self.streams if layout.trunk_hidden == "before_hc_head" else None
        return self.hidden * (1 if streams is None else streams.count)

    def shape(self, kind: LayerKind) -> AttentionShape:
        """The geometry of a layer that attends."""
        if kind.mixer == "sliding":
            assert self.sliding is not None
            return self.sliding
        return AttentionShape(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            dim=self.head_dim,
            v_dim=self.v_dim,
            rope=self.rope,
        )
