"""Passes of blank requests, run and timed as the engine runs real ones, for `profile.py`.

Blank requests own the first blocks of the K/V memory, which is scratch before the first real
request. Device rounds are timed by the backend itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headstart.backends.base import Backend, StateRows, blank_tokens
from headstart.engine.drafter import Drafter
from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.engine.verifier import verify
from headstart.sampling.params import SamplingParams

_CONTEXT = 32  # tokens
_REPEATS = 4


@dataclass(frozen=True)
class Timed:
    """A run that is timed; what comes before it only leaves caches as they are in a round."""

    run: Callable[[], None]
    before: Callable[[], torch.Tensor] | None = None


class BlankPasses:
    """Times verifications and drafts that the host drives."""

    def __init__(
        self, backend: Backend, drafter: Drafter | None, *, max_rows: int, context: int = _CONTEXT
    ):  # fmt: skip
        """`context`: tokens of each request, where there is room for them."""
        self.backend, self._drafter, self._max_rows = backend, drafter, max_rows
        self._sizes = backend.sizes
        slots = self._sizes.num_blocks * self._sizes.block_size
        self._longest = min(slots, backend.model.max_len)
        self.context = max(backend.num_modules + 1, min(context, self._longest // 2))

    def _blocks_each(self, drafts: int) -> int:
        return -(-(self.context + drafts + 2) // self._sizes.block_size)

    def has_room(self, batch: int, drafts: int) -> bool:
        """Whether there is memory for such a round."""
        return (
            self.context + drafts + 2 <= self._longest
            and batch * self._blocks_each(drafts) <= self._sizes.num_blocks
            and batch * (drafts + 1) <= self._max_rows
        )

    def verify_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]:
        """Of each number of drafts, timed in turns: a bad spell of the machine hits all alike."""
        return self.seconds([self.verification(batch, drafts, params) for drafts in counts])

    def verification(self, batch: int, drafts: int, params: SamplingParams) -> Timed:
        """A trunk pass over rows of so many drafts each, and the decision."""
        works = self._works(self._blank(batch, drafts, params), drafts)

        def run() -> None:
            verify(works, self._trunk(works), chooser=self.backend)

        return Timed(run)

    def draft_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]:
        """The same of drafting; nothing without a head."""
        if self._drafter is None:
            return [0.0] * len(counts)
        drafter = self._drafter
        vocabs = {name: len(vocab.ids) for name, vocab in self.backend.draft_vocabs.items()}
        largest = max(vocabs, key=lambda name: vocabs[name], default=None)
        each = [(drafts, self._blank(batch, drafts, params)) for drafts in counts]

        def draft(drafts: int, requests: Sequence[Request]) -> None:
            for request in requests:
                request.draft_vocab = largest  # what a draft costs at most
                drafter.resume(request, at=self.context)
            drafter.propose(dict.fromkeys(requests, drafts))

        seconds = self.seconds(
            [Timed(partial(draft, *own), partial(self._trunk, self._works(own[1], 0)))
             for own in each]
        )  # fmt: skip
        for request in (request for _, requests in each for request in requests):
            drafter.forget(request)
        return seconds

    def _trunk(self, works: Sequence[Work]) -> torch.Tensor:
        _, logits = self.backend.trunk_pass(
            [work.rows(feeds_head=self._drafter is not None) for work in works]
        )
        return logits

    def _works(self, requests: Sequence[Request], drafts: int) -> list[Work]:
        states = None
        if self._sizes.num_states:  # slots are scratch, too
            states = StateRows(0, tuple((row + 1, 0) for row in range(drafts + 1)))
        vocab, more = self.backend.config.vocab, len(requests)  # numbers behind the newest tokens'
        return [
            Work(r, self.context, drafts + 1, tuple(blank_tokens(drafts, vocab, at)), states)
            for at, r in zip(itertools.count(more, max(1, drafts)), requests, strict=False)
        ]

    def _blank(self, batch: int, drafts: int, params: SamplingParams) -> list[Request]:
        """Requests of blank tokens that own the first blocks."""
        each, requests = self._blocks_each(drafts), []
        for number, newest in enumerate(blank_tokens(batch, self.backend.config.vocab)):
            tokens = [newest] * (self.context + 1)
            request = Request(f"cost/{number}", tokens, params, 0, 1, frozenset(), number)
            request.num_computed = self.context
            request.blocks = list(range(number * each, (number + 1) * each))
            requests.append(request)
        return requests

    def seconds(self, runs: Sequence[Timed]) -> list[float]:
        """The quickest of some times each, all in turns; the first turn warms up.

        Runs of other blank passes over the same backend may be among them.
        """
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(1 + _REPEATS):
            for timed, own in zip(runs, times, strict=True):
                if timed.before is not None:
                    timed.before()
                    self._wait()
                started = time.perf_counter()
                timed.run()
                self._wait()
                own.append(time.perf_counter() - started)
        return [min(own[1:]) for own in times]

    def _wait(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()
