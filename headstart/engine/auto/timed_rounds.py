"""Times whole steps of an engine that the host drives, in which all requests draft alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle

from headstart.copying.drafts import Copy
from headstart.data.prompt_reader import PromptReader
from headstart.engine.copies import ContextDrafter
from headstart.engine.core import EngineCore
from headstart.engine.request import Admission, Request
from headstart.sampling.params import SamplingParams

_ROUNDS = 4  # of one number of drafts in a turn,
_MOST_STEPS = 100  # until then,
_SETTLING = 2  # after some that are not counted: the head has to catch up, requests to begin


@dataclass(frozen=True)
class Serving:
    """What will be served: its sampling, how many requests at once, and some of them."""

    params: SamplingParams
    prompts: Sequence[list[int]]
    answer_tokens: int
    requests: int = 1
    max_drafts: int = 8

    @property
    def num_tokens(self) -> int:
        """Of the longest prompt and its answer."""
        return max(map(len, self.prompts)) + self.answer_tokens


@dataclass(frozen=True)
class Cell:
    """One kind of rounds: so many drafts of each request, by the head or copied.

    has_head: an engine with a head, which is to be ready for drafts where there are none.
    """

    drafts: int
    vocab: str | None = None
    is_copied: bool = False
    has_head: bool = True


class _AlwaysCopies(ContextDrafter):
    """Finds something to copy in every round in which a request is to copy."""

    def find_all(
        self, requests: Iterable[Request], count: Callable[[Request], int]
    ) -> dict[Request, Copy]:
        counts = {r: count(r) for r in requests if r.params.draft_from == "context"}
        return {r: Copy(r.tokens[:1] * most, 1) for r, most in counts.items() if most > 0}


@dataclass
class HostTimer:
    """Keeps as many requests running as will be served, and times their steps."""

    core: EngineCore
    prompts: PromptReader
    serving: Serving
    _numbers: Iterator[int] = field(default_factory=count)
    _settling: int = _SETTLING

    def __post_init__(self) -> None:
        pool = self.core.scheduler.pool
        self._admission = Admission(
            self.core.backend.model, self.prompts, self.core.options, num_slots=pool.num_slots
        )
        self._asked = cycle(self.serving.prompts)
        if (sources := self.core.loop.sources) is not None:
            sources.copies = _AlwaysCopies(self.core.options)
        # Nothing may end an answer early: every request is to run for as long as planned.
        self._params = replace(
            self.serving.params, max_tokens=self.serving.answer_tokens, ignore_eos=True, stop=(),
            stop_token_ids=(), min_tokens=0, logprobs=None, n=1,
        )  # fmt: skip

    def rounds(self, cell: Cell) -> list[float]:
        """Seconds of some rounds in which all requests draft as much."""
        own = replace(
            self._params, speculate=cell.drafts, draft_from="context" if cell.is_copied else "head"
        )
        scheduler, loop = self.core.scheduler, self.core.loop
        seconds: list[float] = []
        took, self._settling = 0.0, _SETTLING
        for _ in range(_MOST_STEPS):
            if len(seconds) == _ROUNDS:
                break
            while len(scheduler.running) + len(scheduler.waiting) < self.serving.requests:
                scheduler.add(self._request(), [])
                self._settling = _SETTLING
            for request in [*scheduler.running, *scheduler.waiting]:
                request.params, request.draft_vocab = own, cell.vocab
            # Less is drafted where an answer is about to end.
            is_whole = all(request.room > cell.drafts + 1 for request in scheduler.running)
            started = time.perf_counter()
            loop.step()
            took = time.perf_counter() - started
            if self._settling:
                self._settling -= 1
            elif is_whole and len(scheduler.running) == self.serving.requests:
                seconds.append(took)
        return seconds or [took]  # where there is no room for so many drafts

    def _request(self) -> Request:
        number = next(self._numbers)
        name = f"cost/{number}"
        return self._admission.request(
            name, 0, next(self._asked), self._params, seed=number, priority=0, grammar=None,
            arrival=number,
        )  # fmt: skip
