"""The runner of a GPU: the same two passes through fused kernels, and captured rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from headstart.backends.cuda.fla import choose_scan
from headstart.backends.cuda.forward import Kernels, Rows
from headstart.backends.cuda.latent_prompts import latent_rows
from headstart.backends.cuda.libraries import Library, choose_library
from headstart.backends.cuda.prompts import filling_rows, ragged_rows
from headstart.backends.cuda.recurrent import RecurrentSeats, ragged_recur, settle
from headstart.backends.cuda.rounds import Model
from headstart.backends.cuda.seats import signed
from headstart.backends.cuda.transfer import on_device
from headstart.engine.request import Request
from headstart.engine.runner import Runner
from headstart.engine.wanted_rows import WantedRows
from headstart.models.attention import Span
from headstart.models.delta_rule import Scan, scan_texts
from headstart.models.int8 import add_int8, with_int8
from headstart.models.linear import Linear
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, StateSpan
from headstart.models.trunk import Trunk
from headstart.sampling.params import SamplingParams


class DeviceRunner(Runner):
    """Ragged batches through the kernels; `model` is what captured rounds need."""

    kernels = Kernels()
    keeps_bits = False  # whether a row's bits must not depend on the rows beside it
    library: Library | None = None  # for the attention of long prompts

    def __init__(self, trunk: Trunk, *parts: Any, **sizes: Any):
        super().__init__(trunk, *parts, **sizes)
        config, notes = trunk.config, []
        self.scan: Scan = scan_texts  # for the long spans of recurrent layers
        if not self.keeps_bits and config.mla is None:
            self.library = choose_library(
                config.num_heads, config.num_kv_heads, config.head_dim, self.dtype, self.device
            )
            if self.library is not None:
                notes.append(f"long prompts attend by {self.library.name}")
        if not self.keeps_bits and self._states and config.delta is not None:
            self.scan, note = choose_scan(config.delta, self.dtype, self.device)
            notes += [note] if note else []
        self.note = "; ".join(notes)

    def _run_rows(
        self,
        ids: list[int],
        positions: list[int],
        spans: list[Span],
        wanted: WantedRows,
        states: list[StateSpan],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = self._rows(spans, self._numbers(positions))
        if self._states:
            rows = replace(rows, recur=ragged_recur(self._states, states, self.scan))
        tokens = self._numbers(ids)
        kept, chosen = None, wanted.logits
        if not self.keeps_bits and len(wanted.states) < len(ids):
            kept = self._numbers(wanted.states or [0])  # a kernel wants a row at least
            chosen = wanted.places
        stream, normed = self.kernels.trunk(self.trunk_model, tokens, rows, self._caches, kept)
        rows_of_logits = normed if len(chosen) == len(normed) else normed[self._numbers(chosen)]
        return stream, normed, self._logits(rows_of_logits)

    def _rows(self, spans: list[Span], positions: torch.Tensor) -> Rows:
        """Of the trunk; exact mode has its own."""
        return self._ragged(spans, positions)

    def _ragged(self, spans: list[Span], positions: torch.Tensor) -> Rows:
        """Of trunk and head, as fast as it goes."""
        if self.trunk_model.config.mla is not None:
            return latent_rows(spans, positions)
        return ragged_rows(spans, positions, self.library)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self.trunk_model.logits(normed)

    def _run_module(
        self, module: int, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        spans: list[Span],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert self.head is not None
        return self.kernels.head(
            self.head.module(module + 1), ids[:, None], hidden[:, None],
            self._ragged(spans, positions), self.trunk_model.embed,
            self.trunk_model.rotary, self._head_caches[module],
        )  # fmt: skip

    def _fill_module(
        self, module: int, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        spans: list[Span],
    ) -> None:  # fmt: skip
        assert self.head is not None
        self.kernels.fill_head(
            self.head.module(module + 1), ids[:, None], hidden[:, None],
            filling_rows(spans, positions), self.trunk_model.embed, self.trunk_model.rotary,
            self._head_caches[module],
        )  # fmt: skip

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return on_device(values, self.device)

    def choose_first(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """[n] first tokens of requests that need nothing but logits and noise; nobody waits."""
        params = [request.params for request in requests]
        positions = [len(request.tokens) for request in requests]
        return self._draw(logits, params, [request.seed for request in requests], positions)

    def _draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int],
        positions: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        """[n] choices as a round would make them."""

        def floats(values: Sequence[float]) -> torch.Tensor:
            return on_device(values, self.device, torch.float32)

        return self.kernels.choose_truncated(
            logits, floats([1 / p.temperature if p.temperature > 0 else 0.0 for p in params]),
            self._numbers([signed(seed) for seed in seeds]), self._numbers(positions),
            self._numbers([max(0, p.top_k) for p in params]),
            floats([p.top_p for p in params]), floats([p.min_p for p in params]),
        )  # fmt: skip

    def round_model(self, max_context: int, draft_vocab: str | None) -> Model:
        """What a captured round runs; drafts come from one vocabulary, or from all tokens."""
        lm_head, ids = self.trunk_model.lm_head, None
        if draft_vocab is not None:
            vocab = self.draft_vocabs[draft_vocab]
            assert isinstance(vocab.lm_head, Linear)  # kernels run with no others
            lm_head, ids = vocab.lm_head, vocab.ids
        if self.drafts_in_int8 and self.head is not None:
            lm_head = with_int8(lm_head)
            add_int8(self.head)
        return Model(
            trunk=self.trunk_model, head=self.head, caches=self._caches,
            head_cache=self._head_caches[0] if self.head is not None else None,
            boundary=self._boundary[:, 0] if self.head is not None else self._boundary.flatten(1),
            block_size=self.block_size, draft_lm_head=lm_head, draft_ids=ids,
            max_context=max_context, kernels=self.kernels, states=self._states,
        )  # fmt: skip

    def recurrent_seats(self, count: int, max_drafts: int) -> RecurrentSeats | None:
        """What seats have of recurrent layers, where the model has any."""
        delta, device = self.trunk_model.config.delta, self.device
        if delta is None or not self._states:
            return None
        layers = len(self._states)
        return RecurrentSeats.create(delta, layers, count, max_drafts, self.dtype, device)

    def settle_states(self, seats: RecurrentSeats, lengths: list[int]) -> None:
        """The states of those who sit, from the first seat on, as if the host had done all."""
        nets = [m for m in self.trunk_model.modules() if isinstance(m, DeltaNet)]
        settle(nets, seats, self._states, lengths)

    @property
    def layer_states(self) -> list[LayerStates]:
        return self._states
