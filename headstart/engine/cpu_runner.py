"""The runner of a CPU with the compiled kernels: whole passes as one call each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import Any

import numpy as np
import torch

from headstart.backends.numba.chains import Chain, HeadKernels, Tokens
from headstart.backends.numba.compiler import kept_in
from headstart.backends.numba.drafts import best_of_rows
from headstart.backends.numba.forward import TrunkKernels, matrices, places_of, seats_of
from headstart.engine.head_rows import HeadRows
from headstart.engine.runner import Runner
from headstart.engine.wanted_rows import WantedRows
from headstart.models.attention import Span
from headstart.models.mtp import MTPModule
from headstart.models.recurrence import StateSpan
from headstart.models.trunk import Trunk
from headstart.sampling.choose import choose
from headstart.sampling.rows import Row

_SILENT_SECONDS = 3.0  # more than loading what was compiled takes
_COMPILING = "compiling kernels for this CPU, once per machine and format: about half a minute"
_LOG = logging.getLogger(__name__)


@contextmanager
def _told_if_it_takes_long() -> Iterator[None]:
    """Who waits for a compiler learns what for."""
    notice = Timer(_SILENT_SECONDS, _LOG.warning, [_COMPILING])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


class CpuRunner(Runner):
    """All rows, those of prompts too, get bits that depend on the tokens before them alone."""

    def __init__(self, trunk: Trunk, *parts: Any, **sizes: Any):
        super().__init__(trunk, *parts, **sizes)
        self._caches, self._head_caches = [], []  # the kernels have memory of their own
        slots = len(self._boundary) * self.block_size
        self._kernels = TrunkKernels(trunk, slots)
        modules = [] if self.head is None else list(self.head.modules_)
        self._modules = [
            HeadKernels(module, trunk, slots) for module in modules if isinstance(module, MTPModule)
        ]
        self._tokens: dict[str | None, Tokens] = {}  # by draft vocabulary
        self.chooser = _choose
        if len(modules) == len(self._modules) == 1:
            self.chain = self._chain
        self.note = self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> str:
        """Compile, or load what was compiled, before the first request waits for it."""
        started = time.perf_counter()
        with _told_if_it_takes_long():
            self._run_once()
        seconds = time.perf_counter() - started
        return f"compiled kernels: ready after {seconds:.1f} s (compiled once, kept in {kept_in()})"

    def _run_once(self) -> None:
        blank = [Span(0, 1, slice(0, 1), slice(0, 1))]  # K/V memory is scratch before it
        wanted = WantedRows([0], [0], [0], [slice(0, 1)])
        _, normed, _ = self._run_rows([0], [0], blank, wanted, [])
        for module in self._modules:
            module.run(self._numbers([0]), normed, seats_of(blank, [0]))
        if self.chain is not None:
            place = np.zeros(1, np.int64)
            start = Chain(1, 0, place, place, 1)
            self._modules[0].draft(self._numbers([0]), normed, [start], self._among(None))
        best_of_rows(np.zeros((1, 1), np.float32))

    def _run_rows(
        self,
        ids: list[int],
        positions: list[int],
        spans: list[Span],
        wanted: WantedRows,
        states: list[StateSpan],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._kernels.run(self._numbers(ids), seats_of(spans, positions), wanted.logits)

    def _run_module(
        self, module: int, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        spans: list[Span],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        return self._modules[module].run(ids, hidden, seats_of(spans, positions.tolist()))

    def _chain(
        self, rows: Sequence[HeadRows], counts: Sequence[int], vocab: str | None
    ) -> list[list[int]]:
        ids: list[int] = []
        chains: list[Chain] = []
        for part, depths in zip(rows, counts, strict=True):
            own = len(part.tokens)
            span = self._span(part.request, len(ids), part.start, own + depths - 1, first=1)
            slots, seen = places_of(span.new), places_of(span.context)
            chains.append(Chain(own, part.start - 1, slots, seen, depths))
            ids += part.tokens
        hidden = rows[0].states if len(rows) == 1 else torch.cat([part.states for part in rows])
        drafts = self._modules[0].draft(self._numbers(ids), hidden, chains, self._among(vocab))
        return [drafts[:depths, i].tolist() for i, depths in enumerate(counts)]

    def _among(self, vocab: str | None) -> Tokens:
        if vocab not in self._tokens:
            if vocab is None:
                found = Tokens(matrices([self._lm_head(0)]), np.empty(0, np.int64))
            else:
                known = self.draft_vocabs[vocab]
                found = Tokens(matrices([known.lm_head]), known.ids.numpy())
            self._tokens[vocab] = found
        return self._tokens[vocab]

    def add_draft_vocab(self, name: str, ids: Sequence[int]) -> None:
        super().add_draft_vocab(name, ids)
        self._tokens.pop(name, None)


def _choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The ordinary choice; torch's arg-max would wake threads that then keep a core busy."""
    if all(row.is_plain_greedy for row in rows):
        return [int(best) for best in best_of_rows(logits.numpy())]
    return [int(token) for token in choose(logits, rows).tolist()]
