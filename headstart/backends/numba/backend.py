"""A CPU with the compiled kernels: whole passes, chains of drafts, choices, as one call each.

All rows, those of prompts too, get bits that depend on the tokens before them alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from threading import Timer
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from headstart.backends.base import Backend, BackendOptions
from headstart.backends.numba.adjusting import Settings
from headstart.backends.numba.chooser import CompiledChooser
from headstart.backends.numba.compiler import kept_note
from headstart.backends.numba.forward import (
    DraftTokens,
    HeadKernels,
    TrunkKernels,
)
from headstart.backends.numba.layers import argmax_rows
from headstart.backends.numba.linear import Packed
from headstart.backends.numba.own_rows import OwnOfBatch, OwnRows
from headstart.backends.numba.packing import pack_rest
from headstart.backends.numba.row_layouts import TextRows, joined, layout_of
from headstart.backends.numba.vectors import LANES
from headstart.backends.numba.weight_formats import FORMS, widened_notes
from headstart.backends.results import CacheSizes, DraftChain, HeadOutput
from headstart.backends.rows import HeadRows, StateRows, TrunkOutput, TrunkRows
from headstart.backends.torch.threads import use_all_cores
from headstart.backends.weights import beside_layers, convert_trunk, convert_weights
from headstart.models.build import LoadedModel
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.mtp import MTPHead, MTPModule
from headstart.sampling.params import Row, SamplingParams
from headstart.vocab.own_tokens import OwnTokens

_SILENT_SECONDS = 3.0  # more than loading what was compiled takes
_COMPILING = "compiling kernels for this CPU, once per machine and format: about half a minute"
_LOG = logging.getLogger(__name__)


@contextmanager
def _notice_if_it_takes_long() -> Iterator[None]:
    """Log why a start takes long while kernels are compiled."""
    notice = Timer(_SILENT_SECONDS, _LOG.warning, [_COMPILING])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


class NumbaBackend(CompiledChooser, Backend):
    """A model on a CPU: every pass, chain of drafts and choice is one compiled call."""

    name = "numba"

    def __init__(self, model: LoadedModel, options: BackendOptions):
        Backend.__init__(self, model, options)
        CompiledChooser.__init__(self, self.config.vocab)
        self.notes += widened_notes([self.trunk, *([] if self.head is None else [self.head])])
        convert_trunk(self.trunk, FORMS, options.weights)
        pack_rest(self.trunk)
        if self.head is not None:
            self.hold_head(self.head)
        if options.threads is None:
            self.notes += use_all_cores()
        self.drafts_chains = self.num_modules == 1
        self._tokens: dict[str | None, DraftTokens] = {}  # by draft vocabulary
        self._own: WeakKeyDictionary[OwnTokens, dict[int, OwnRows]] = WeakKeyDictionary()
        self._greedy: dict[int, Settings] = {}  # of so many plain greedy requests
        self._trunk: TrunkKernels | None = None
        self._modules: list[HeadKernels] = []

    def hold_head(self, head: MTPHead) -> None:
        convert_weights(head, FORMS[beside_layers(self.options.weights)])
        pack_rest(head)

    def head_swapped(self) -> None:
        assert self.head is not None
        self._own.clear()  # copies of what was swapped
        for name, known in self.draft_vocabs.items():
            if name in self._tokens:
                self._tokens[name].ids[:] = self._tokens_of(known.ids)
        rows = [own for known in self.draft_vocabs.values() for own in known.lm_heads]
        for part in [*self.head.modules(), *rows]:
            if isinstance(part, Packed):
                part.weights_changed()
        for module in self._modules:
            module.weights_changed()

    def _allocate(self, sizes: CacheSizes) -> None:
        # Packed weights are views of what these hold: with the old ones all would be held twice.
        self._trunk, self._modules = None, []
        self._tokens.clear()
        self._own.clear()
        started = time.perf_counter()
        with _notice_if_it_takes_long(), torch.inference_mode():
            self._hold(sizes.num_blocks * sizes.block_size, sizes.num_states)
            self._run_once()
        seconds = time.perf_counter() - started
        self.notes.append(f"compiled kernels: ready after {seconds:.1f} s ({kept_note()})")

    def slot_bytes(self, config: ModelConfig, kind: LayerKind) -> int:
        """Keys and values lie apart, values filled up to whole vectors."""
        if not kind.attends:
            return 0
        if kind.mixer == "latent":
            assert config.mla is not None
            heads, dim, v_dim = 1, config.mla.entry, config.mla.kv_rank
        else:
            shape = config.shape(kind)
            heads, dim, v_dim = shape.kv_heads, shape.dim, shape.v_dim
        return heads * (dim + -(-v_dim // LANES) * LANES) * self.dtype.itemsize

    def _hold(self, slots: int, states: int) -> None:
        """Weights and memory as kernels read them, which compiles the products of their formats."""
        self._trunk = TrunkKernels(self.trunk, slots, states)
        modules = [] if self.head is None else list(self.head.modules_)
        self._modules = [
            HeadKernels(module, self.trunk, slots)
            for module in modules
            if isinstance(module, MTPModule)
        ]

    def _run_once(self) -> None:
        """Compile, or load what was compiled, before the first request waits for it."""
        blank = TextRows(1, np.zeros(1, np.int64))  # K/V memory is scratch before it
        states = [StateRows(None, ((1, 0),))] if self.config.num_recurrent else []
        ids, layout = [0], layout_of([blank], states)
        assert self._trunk is not None
        _, hidden, _ = self._trunk.run(ids, layout, [0])
        self.logits(torch.from_numpy(hidden))  # products by themselves: of prompts that are scored
        for module in self._modules:
            module.run(ids, hidden, layout)
        argmax_rows(np.zeros((1, 1), np.float32))
        self.warm_up()
        if self.drafts_chains:
            rows = [Row(SamplingParams(temperature=0), 0, 0)]
            self._modules[0].draft(
                ids, hidden, [blank], self._draft_tokens(None), None, self._draft_settings(rows), 0
            )

    def trunk_pass(self, requests: Sequence[TrunkRows]) -> TrunkOutput:
        assert self._trunk is not None
        texts = [TextRows.of(rows, self.sizes.block_size) for rows in requests]
        ids: list[int] = []
        wanted: list[int] = []
        parts: list[slice] = []
        for rows in requests:
            begin = len(ids)
            ids += rows.tokens
            wanted += range(len(ids) - rows.num_logits, len(ids))
            parts.append(slice(begin, len(ids)))
        layout = layout_of(texts, [rows.states for rows in requests])
        stream, normed, logits = self._trunk.run(ids, layout, wanted)
        states = stream if self.feeds_stream else normed
        return [torch.from_numpy(states[part]) for part in parts], torch.from_numpy(logits)

    def head_pass(self, module: int, requests: Sequence[HeadRows]) -> HeadOutput:
        """Module j has no entry in slots 0 to j."""
        size = self.sizes.block_size
        texts = [TextRows.of(rows, size, first=module + 1) for rows in requests]
        ids = [token for rows in requests for token in rows.tokens]
        normed, recycled = self._modules[module].run(ids, _hidden(requests), layout_of(texts))
        last = [end - 1 for end in accumulate(text.count for text in texts)]
        return HeadOutput(torch.from_numpy(normed), torch.from_numpy(recycled), last)

    def save_boundaries(self, blocks: list[int], module: int, states: Tensor) -> None:
        self._boundary.numpy()[blocks, module] = states.numpy()

    def draft_chain(
        self, requests: Sequence[HeadRows], counts: Sequence[int], rows: Sequence[Row],
        vocab: str | None, own: Sequence[OwnTokens | None] = (),
    ) -> list[DraftChain]:  # fmt: skip
        size = self.sizes.block_size
        texts = [
            TextRows.of(request, size, first=1, later=depths - 1)
            for request, depths in zip(requests, counts, strict=True)
        ]
        ids = [token for request in requests for token in request.tokens]
        extra = [None if each is None else self._own_rows(each, vocab) for each in own]
        rejects = [row.params.acceptance == "rejection" for row in rows]
        drafts, probs, states = self._modules[0].draft(
            ids, _hidden(requests), texts, self._draft_tokens(vocab),
            OwnOfBatch.of(extra, counts[0]) if any(extra) else None,
            self._draft_settings(rows), self.config.vocab if any(rejects) else 0,
        )  # fmt: skip
        return [
            DraftChain(
                drafts[:depths, i].tolist(),
                torch.from_numpy(states[:depths, i]),
                torch.from_numpy(probs[:depths, i].copy()) if rejects[i] else None,
            )
            for i, depths in enumerate(counts)
        ]

    def _own_rows(self, own: OwnTokens, vocab: str | None, module: int = 0) -> OwnRows:
        """LM-head rows of the tokens that a request has beside its vocabulary, up to date."""
        by_module = self._own.setdefault(own, {})
        if module not in by_module:
            lm_head = self._lm_head(module)
            assert vocab is not None and isinstance(lm_head, Packed)
            by_module[module] = OwnRows(lm_head, self._tokens_of(self.draft_vocabs[vocab].ids))
        by_module[module].follow(own)
        return by_module[module]

    def _own_logits(self, normed: Tensor, vocab: str, own: OwnTokens, module: int) -> Tensor:
        return self._own_rows(own, vocab, module).logits(normed)

    def token_logits(self, normed: Tensor, ids: Tensor, module: int = 0) -> Tensor:
        lm_head = self._lm_head(module)
        assert isinstance(lm_head, Packed)
        rows = lm_head.blank_rows(len(ids))
        rows.copy_rows(lm_head, ids.tolist(), range(len(ids)))
        return rows.multiplied(normed)

    def _draft_settings(self, rows: Sequence[Row]) -> Settings:
        if not all(row.is_plain_greedy for row in rows):
            return self.packer.pack(rows, penalties=False)
        if len(rows) not in self._greedy:
            self._greedy[len(rows)] = self.packer.pack(rows, penalties=False)
        return self._greedy[len(rows)]

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        if all(row.is_plain_greedy for row in rows):
            return [int(best) for best in argmax_rows(logits.numpy())]
        return super().choose(logits, rows)

    def _draft_tokens(self, vocab: str | None) -> DraftTokens:
        """What drafts are chosen among."""
        if vocab not in self._tokens:
            if vocab is None:
                found = DraftTokens.of(self._lm_head(0), self._tokens_of(None))
            else:
                known = self.draft_vocabs[vocab]
                found = DraftTokens.of(known.lm_heads[0], self._tokens_of(known.ids))
            self._tokens[vocab] = found
        return self._tokens[vocab]

    def add_draft_vocab(self, name: str, ids: Sequence[int]) -> None:
        super().add_draft_vocab(name, ids)
        self._tokens.pop(name, None)
        if self.drafts_chains:
            self._draft_tokens(name)  # packed now, not when the first request waits for it


def _hidden(requests: Sequence[HeadRows]) -> np.ndarray:
    """What the rows of some requests are fused with."""
    return joined([rows.states.numpy() for rows in requests])
