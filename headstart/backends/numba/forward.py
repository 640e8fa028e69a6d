"""Trunk and head through the compiled kernels: each pass, and each chain of drafts, is one call.

All rows go this way, prompts too: a token's bits then depend on the tokens before it alone, not
on how a prompt was cut, on drafts, or on other requests in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np
from torch import nn

from headstart.backends.numba import layers as kernels
from headstart.backends.numba.adjusting import Settings
from headstart.backends.numba.calls import OUTPUTS
from headstart.backends.numba.held import HeldStep, Memory, matrix_rows, num_weights, steps_of
from headstart.backends.numba.own_rows import OwnOfBatch
from headstart.backends.numba.packing import lay_together
from headstart.backends.numba.passes import RowLayout
from headstart.backends.numba.row_layouts import TextRows, later_layout, layout_of
from headstart.backends.numba.thread_pool import POOL, new_counters
from headstart.models.layers import DecoderLayer
from headstart.models.mtp import MTPModule
from headstart.models.norm import Norm
from headstart.models.trunk import Trunk

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Block:
    """Layers in the form that kernels read, with their memory."""

    steps: tuple[HeldStep, ...]
    table: np.ndarray  # int64 [steps, STEP]
    weights: int  # that a row is multiplied with
    _known: dict[int, tuple[int, int]] = field(default_factory=dict)  # `_sizes` by rows

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], memories: Sequence[Memory]) -> Block:
        """The layers' own matrices move into one piece of memory: nothing is held twice."""
        lay_together(layers)
        each = zip(layers, memories, strict=True)
        steps = [step for layer, memory in each for step in steps_of(layer, memory)]
        weights = sum(step.weights for step in steps)
        return cls(tuple(steps), np.stack([step.row for step in steps]), weights)

    def scratch(self, rows: int) -> np.ndarray:
        return np.empty(self._sizes(rows)[0], np.float32)

    def phases(self, rows: int) -> int:
        return self._sizes(rows)[1]

    def _sizes(self, rows: int) -> tuple[int, int]:
        """Floats of memory, and phases, for so many rows; asked for in every pass."""
        if rows not in self._known:
            floats = max(step.floats(rows) for step in self.steps)
            self._known[rows] = floats, sum(step.phases(rows) for step in self.steps)
        return self._known[rows]


class TrunkKernels:
    """A trunk's pass, with its LM head."""

    def __init__(self, trunk: Trunk, slots: int, states: int):
        final_norm = _checked(trunk.final_norm, Norm)
        self._embed, self._final_norm = trunk.embed.numpy(), final_norm.factor.numpy()
        self._eps = final_norm.eps
        config = trunk.config
        memories = [
            Memory(
                slots, states,
                trunk.sliding_rotary if kind.mixer == "sliding" and trunk.sliding_rotary is not None
                else trunk.rotary,
                window,
            )
            for kind, window in zip(config.layers, config.windows, strict=True)
        ]  # fmt: skip
        layers = [_checked(layer, DecoderLayer) for layer in trunk.layers]
        self._block = Block.of(layers, memories)
        self._trunk, self._lm_head = trunk, matrix_rows([trunk.lm_head])

    def run(
        self, ids: Sequence[int], layout: RowLayout, wanted: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids [rows] -> the residual stream, its final norm, and logits of the wanted rows."""
        block, stream = self._block, self._embed.take(ids, 0)
        logits = np.empty((len(wanted), int(self._lm_head[0, OUTPUTS])), np.float32)
        normed = POOL.run(
            len(ids) * block.weights, kernels.run_trunk,
            new_counters(block.phases(len(ids)) + 1), stream, block.scratch(len(ids)),
            block.table, self._eps, layout, self._final_norm, self._lm_head,
            np.array(wanted, np.int64), logits, held=self,
        )  # fmt: skip
        return stream, normed, logits


def _input_norms(module: MTPModule) -> np.ndarray:
    """[2, hidden] of what comes first and second where token and state are fused."""
    both = [module.embed_norm.factor.numpy(), module.hidden_norm.factor.numpy()]
    return np.stack(both if module.layout.fuse_order == "embed_first" else both[::-1])


def _checked(module: nn.Module, kind: type[Kind]) -> Kind:
    assert isinstance(module, kind), "others are refused"
    return module


@dataclass(frozen=True)
class DraftTokens:
    """What drafts are chosen among: an LM head, and the ids of its rows, int32."""

    module: nn.Module  # whose tensors kernels read
    lm_head: np.ndarray
    ids: np.ndarray
    weights: int  # that a row is multiplied with

    @classmethod
    def of(cls, module: nn.Module, ids: np.ndarray) -> DraftTokens:
        lm_head = matrix_rows([module])
        return cls(module, lm_head, ids, num_weights(lm_head))


class HeadKernels:
    """One module of a head."""

    def __init__(self, module: MTPModule, trunk: Trunk, slots: int):
        self._module, layout = module, module.layout
        self._embed, self._hides_first = trunk.embed.numpy(), layout.zero_embed_at_position_0
        memory = Memory(slots, 0, module.rotary or trunk.rotary, module.window)
        self._block = Block.of([module.decoder], [memory])
        out = module.out_norm
        self._head = kernels.Head(
            self._block.table, module.embed_norm.eps, _input_norms(module),
            matrix_rows([module.fuse]),
            np.empty(0, np.float32) if out is None else out.factor.numpy(),
            layout.fuse_order != "embed_first", layout.recycled_hidden == "after_out_norm",
        )  # fmt: skip

    def weights_changed(self) -> None:
        """Other weights were written into the module's memory, of which this has a copy."""
        self._head.norms[:] = _input_norms(self._module)

    def run(
        self, ids: Sequence[int], hidden: np.ndarray, layout: RowLayout
    ) -> tuple[np.ndarray, np.ndarray]:
        """ids [rows] and hidden [rows, D] -> the state for the LM head and the recycled one."""
        embedded = self._embedded(ids, layout)
        _, normed, recycled = POOL.run(
            len(ids) * self._block.weights, kernels.run_head,
            new_counters(kernels.HEAD_PHASES + self._block.phases(len(ids))), 0, embedded,
            np.ascontiguousarray(hidden), np.empty_like(embedded), self._block.scratch(len(ids)),
            self._head, layout, held=self,
        )  # fmt: skip
        return normed, recycled

    def draft(
        self, ids: Sequence[int], hidden: np.ndarray, texts: Sequence[TextRows],
        tokens: DraftTokens, own: OwnOfBatch | None, settings: Settings, num_probs: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """Drafts [depths, texts], what they were drawn from [depths, texts, num_probs], and the
        states that would feed each next depth [depths, texts, hidden].

        Texts with most drafts come first, as their `own` tokens do; num_probs: all tokens, or 0.
        """
        layout = layout_of(texts)
        active = [sum(text.later >= depth for text in texts) for depth in range(texts[0].later + 1)]
        embedded = self._embedded(ids, layout)
        shape = (len(active), len(texts))
        buffers = kernels.ChainBuffers(
            np.empty((len(active) - 1, len(texts), embedded.shape[1]), np.float32),
            np.empty((*shape, len(tokens.ids)), np.float32), np.empty(shape, np.int64),
            np.empty((*shape, num_probs), np.float32),
        )  # fmt: skip
        extra = kernels.no_own_columns(*shape[::-1]) if own is None else own.columns
        work = len(ids) * self._block.weights + sum(active) * tokens.weights
        phases = sum(
            kernels.HEAD_PHASES
            + self._block.phases(rows)
            + (0 if own is None else own.num_phases(going))
            for rows, going in zip((len(ids), *active[1:]), active, strict=True)
        )
        drafts, states = POOL.run(
            work, kernels.run_chain, new_counters(phases), embedded,
            np.ascontiguousarray(hidden), np.empty_like(embedded), self._block.scratch(len(ids)),
            self._head, layout, np.array([end - 1 for end in accumulate(t.count for t in texts)]),
            later_layout(texts, layout), np.array(active), self._embed, tokens.lm_head, tokens.ids,
            extra, settings, buffers, held=(self, tokens, own),
        )  # fmt: skip
        return drafts, buffers.probs, states

    def _embedded(self, ids: Sequence[int], layout: RowLayout) -> np.ndarray:
        embedded = self._embed.take(ids, 0)
        if self._hides_first and not layout.positions.all():
            embedded[layout.positions == 0] = 0
        return embedded
