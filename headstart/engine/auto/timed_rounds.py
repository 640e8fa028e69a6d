"""Times whole steps of an engine that the host drives, in which all requests draft alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from math import inf
from typing import Literal, NamedTuple

from headstart.copying.drafts import Copy
from headstart.data.prompt_reader import PromptReader
from headstart.engine.admission import Admission
from headstart.engine.copies import ContextDrafter
from headstart.engine.core import EngineCore
from headstart.engine.options import MENU, VERIFIED, Speculate
from headstart.engine.request import Request
from headstart.errors import EngineError
from headstart.sampling.params import DraftFrom, SamplingParams

_ROUNDS = (2, 12)  # of one cell at a time, at least and at most,
_MOST_STEPS = 100  # until then, beside those that read prompts,
_SETTLING = 3  # after some that are not counted: the head has to catch up with a new request


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

    def reading_steps(self, rows: int) -> int:
        """How many steps the prompts of all requests take at most, with so many rows in each."""
        return -(-self.requests * max(map(len, self.prompts)) // rows)

    def outlasting(self, rows: int) -> Serving:
        """The same with answers that go on when the prompts of the other requests are read: rounds
        count in which all decode."""
        others = replace(self, requests=self.requests - 1).reading_steps(rows)
        drafted = others * (1 + max(self.max_drafts, VERIFIED[-1]))  # copies are as many as may be
        return replace(self, answer_tokens=max(self.answer_tokens, 2 * drafted))


@dataclass(frozen=True)
class Cell:
    """One kind of rounds: what the engine was made for, and what its requests draft.

    `speculate`: of the engine: 0 and "context" have no head, others keep theirs ready for drafts.
    `drafts`: of each request, by the head or copied; "auto": as the engine chooses.
    """

    speculate: Speculate
    drafts: int | Literal["auto"] = 0
    vocab: str | None = None
    draft_from: DraftFrom = "head"

    @property
    def is_copied(self) -> bool:
        """Whether the drafts are copies, which are made up: any copy takes as long."""
        return self.draft_from == "context" and self.drafts != "auto"


class TimedRound(NamedTuple):
    """Seconds of a step, and what choosing drafts took of it, where something drafts."""

    seconds: float
    context: int  # tokens of all requests
    deciding: float
    could_copy: bool  # whether any request could


class _Copies(ContextDrafter):
    """Finds copies; where a request is to copy so many tokens, some in every round."""

    def find_all(
        self, requests: Iterable[Request], count: Callable[[Request], int]
    ) -> dict[Request, Copy]:
        given = [r for r in requests if r.params.speculate and _copies_so_many(r.params)]
        found = super().find_all([r for r in requests if r not in given], count)
        counts = {request: count(request) for request in given}
        return found | {r: Copy(r.tokens[:1] * most, 1) for r, most in counts.items() if most > 0}


def _copies_so_many(params: SamplingParams) -> bool:
    return params.draft_from == "context" and isinstance(params.speculate, int)


@dataclass
class HostTimer:
    """Keeps as many requests running as will be served, and times their steps."""

    core: EngineCore
    prompts: PromptReader
    serving: Serving
    _numbers: Iterator[int] = field(default_factory=count)
    _asked: Iterator[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        pool = self.core.scheduler.pool
        self._admission = Admission(
            self.core.backend.model, self.prompts, self.core.options, num_slots=pool.num_slots
        )
        self.begin(0)
        if (sources := self.core.loop.sources) is not None:
            sources.copies = _Copies(self.core.options)
        # Nothing may end an answer early: every request is to run for as long as planned.
        self._params = replace(
            self.serving.params, max_tokens=self.serving.answer_tokens, ignore_eos=True, stop=(),
            stop_token_ids=(), min_tokens=0, logprobs=None, n=1,
        )  # fmt: skip

    def begin(self, turn: int) -> None:
        """New requests, with other prompts in every turn: all engines have the same at a time."""
        scheduler, prompts = self.core.scheduler, self.serving.prompts
        for request in [*scheduler.running, *scheduler.waiting]:
            self.core.loop.abort(request)
        first = turn * self.serving.requests
        self._asked = cycle(
            prompts[(first + i) % len(prompts)] for i in range(self.serving.requests)
        )

    def rounds(self, cell: Cell, seconds: float = inf) -> list[TimedRound]:
        """Some rounds in which all requests decode and draft as the cell says.

        Few of them where they take longer than `seconds`; EngineError without memory for them.
        """
        least, most = _ROUNDS
        scheduler = self.core.scheduler
        # Less is drafted where an answer is about to end.
        room = 1 + (MENU[-1] if cell.drafts == "auto" else cell.drafts)
        found: list[TimedRound] = []
        last: TimedRound | None = None  # of the rounds in which all decode
        settling, spent = _SETTLING, 0.0
        for _ in range(_MOST_STEPS + 2 * self.serving.reading_steps(self.core.options.num_rows)):
            if len(found) == most or (spent > seconds and len(found) >= least):
                break
            self._ask_as(cell)
            running = list(scheduler.running)
            is_full = len(running) == self.serving.requests
            is_full = is_full and all(request.is_decoding for request in running)
            has_room = all(request.room > room for request in running)
            timed = self._step()
            if not is_full:
                settling = _SETTLING
                continue
            last, spent = timed, spent + timed.seconds
            if settling:
                settling -= 1
            elif has_room:
                found.append(timed)
        if last is None:
            raise EngineError(
                f"--requests is {self.serving.requests}, and they never decoded all at once: "
                f"prompts of up to {max(map(len, self.serving.prompts))} tokens take too long to "
                f"read. {self._remedy}"
            )
        return found or [last]  # where there is no room for so many drafts

    @property
    def _remedy(self) -> str:
        fewer = "Lower --requests" if self.serving.requests > 1 else "Leave out the longest texts"
        return f"{fewer}, or give --bandwidth."

    def _ask_as(self, cell: Cell) -> None:
        """As many requests as are served, and all of them as the cell says."""
        scheduler = self.core.scheduler
        while len(scheduler.running) + len(scheduler.waiting) < self.serving.requests:
            scheduler.add(self._request(), [])
        own = replace(self._params, speculate=cell.drafts, draft_from=cell.draft_from)
        for request in [*scheduler.running, *scheduler.waiting]:
            request.params, request.draft_vocab = own, cell.vocab

    def _step(self) -> TimedRound:
        loop, sources, scheduler = self.core.loop, self.core.loop.sources, self.core.scheduler
        context = sum(len(request.tokens) for request in scheduler.running)
        waiting, preempted = list(scheduler.waiting), scheduler.num_preemptions
        reads = any(not request.is_decoding for request in scheduler.running)
        before = 0.0 if sources is None else sources.deciding_seconds
        started = time.perf_counter()
        loop.step()
        took = time.perf_counter() - started
        # Nothing but memory keeps a request waiting where no other prompt is read.
        is_stuck = bool(waiting) and waiting == scheduler.waiting and not reads
        if is_stuck or scheduler.num_preemptions > preempted:
            raise EngineError(
                f"--requests is {self.serving.requests}, and there is memory for "
                f"{len(scheduler.running)} of them, of up to {self.serving.num_tokens} tokens, "
                "beside those of other engines that are timed in turns. "
                f"{self._remedy}"
            )
        if sources is None:
            return TimedRound(took, context, 0.0, could_copy=False)
        copies = map(sources.copies.found, self.core.scheduler.running)
        deciding = sources.deciding_seconds - before
        return TimedRound(took, context, deciding, could_copy=any(copies))

    def _request(self) -> Request:
        number = next(self._numbers)
        name = f"cost/{number}"
        return self._admission.request(
            name, 0, next(self._asked), self._params, seed=number, priority=0, grammar=None,
            arrival=number,
        )  # fmt: skip
