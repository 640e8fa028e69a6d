"""Which requests run in the next step, how many rows each, where their K/V goes. Ints only.

There is no prefill phase and no decode phase: a request has tokens, of which some are computed,
and a step moves the second number towards the first under a budget of rows. Requests that are
generating go first, so long prompts never stop them; memory that runs out is taken from the
least important request, which starts again later.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headstart.backends.base import StateRows, TrunkRows
from headstart.engine.kv_cache import BlockPool, RequestBlocks, extend_digests
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request, State
from headstart.engine.state_cache import StatePlan

# A prompt that goes on in a later pass is cut at multiples of so many rows, where passes are large:
# libraries make a plan for every shape that they meet, so the shapes of chunks should come again.
_CUT = 2048


@dataclass(frozen=True)
class Work:
    """One request's share of a step: trunk rows for slots [start, start + count)."""

    request: Request
    start: int
    count: int
    drafts: tuple[int, ...]  # those of the rows that are guesses
    states: StateRows | None = None  # slots of a model with recurrent layers

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def needs_logits(self) -> bool:
        """Whether the last row's token is the newest one (not the middle of a prompt)."""
        return self.stop >= len(self.request.tokens)

    @property
    def num_logits(self) -> int:
        return 1 + len(self.drafts) if self.needs_logits else 0

    def rows(self, *, feeds_head: bool) -> TrunkRows:
        """The same for a backend."""
        request = self.request
        if self.drafts:
            tokens = [request.tokens[-1], *self.drafts]
        else:
            tokens = request.tokens[self.start : self.stop]
        wants_states = feeds_head or request.is_scoring
        return TrunkRows(
            tokens, self.start, request.blocks, self.num_logits, wants_states, self.states
        )


class Scheduler:
    """Requests that wait and run, and the blocks of their K/V; `plan` says what a step computes."""

    def __init__(self, pool: BlockPool, options: EngineOptions, states: StatePlan | None = None):
        self.pool, self._options, self.states = pool, options, states
        self._blocks = RequestBlocks(pool)
        self._max_rows, self._max_running = options.num_rows, options.num_requests
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._restarted: list[Request] = []
        self._held_back: dict[str, list[Request]] = {}  # by the sibling they wait for

    def add(self, request: Request, siblings: Sequence[Request] = ()) -> None:
        """Queue a request; `siblings` have the same prompt, and follow when it has been read.

        They then find it cached. Where that cannot be, there is nothing to wait for.
        """
        self.waiting.append(request)
        if self._options.prefix_caching and request.num_prompt > self.pool.block_size:
            self._held_back[request.id] = list(siblings)
        else:
            self.waiting += siblings

    def has_siblings(self, request: Request) -> bool:
        """Whether other samples wait for this request's prompt."""
        return bool(self._held_back.get(request.id))

    @property
    def num_held_back(self) -> int:
        """Samples that wait for a sibling to read their prompt."""
        return sum(map(len, list(self._held_back.values())))

    def release_siblings(self, request: Request) -> None:
        self.waiting += self._held_back.pop(request.id, [])

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and give its memory back."""
        self.release_siblings(request)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._blocks.forget(request)
        self._give_back(request)
        request.blocks = []
        request.state = State.FINISHED

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        if self.states is not None:
            self.states.release(request)

    def plan(self, elsewhere: Collection[Request] = ()) -> list[Work]:
        """The work of the next step; empty if there is nothing to do.

        Requests that decode `elsewhere` are left alone, and so is their memory.
        """
        budget = room = self._max_rows
        works: dict[str, Work] = {}
        candidates = [request for request in self.running if request not in elsewhere]
        by_importance = sorted(candidates, key=lambda r: (not r.is_decoding, *r.importance))
        reserved = sum(r.is_decoding for r in by_importance)  # a row for each that generates
        # and, before drafts, one for a prompt: drafts that fill a small budget would lock it out
        for_prompts = int(bool(self.waiting) or reserved < len(by_importance))
        for request in by_importance:
            if request.state is not State.RUNNING:  # preempted for a more important one
                continue
            reserved -= request.is_decoding
            share = budget - reserved - (for_prompts if request.is_decoding else 0)
            rows = self._rows(request, max(share, min(budget, 1)), room, is_first=not works)
            if rows > 1 and request.is_decoding and not self._fits(request, rows):
                rows = 1  # drafts are dropped before another request loses memory for them
            if rows < 1 or not self._make_room(request, rows, works, candidates):
                continue
            works[request.id] = _work(request, rows)
            budget = self._max_rows - sum(w.count for w in works.values())
            if request.is_decoding:
                room = budget
        self._admit(works, budget, room)
        if self.states is None:
            return list(works.values())
        return self.states.place(list(works.values()))

    def _rows(self, request: Request, budget: int, room: int, *, is_first: bool) -> int:
        if request.is_decoding:
            return min(1 + len(request.drafts), budget)
        left = len(request.tokens) - request.num_computed
        if self._options.chunked_prefill:
            if request.is_scoring:  # the LM head over all rows costs up to as much as the trunk
                budget = min(budget, max(1, self._max_rows // 2))
            return self._cut(request.num_computed, left, budget, room)
        return left if left <= budget or is_first else 0

    def _cut(self, start: int, left: int, budget: int, room: int) -> int:
        """Rows of a prompt that is read up to `start`; none where what fits is no whole part.

        `room`: rows that decoding requests leave. Where it has no whole part, a prompt takes what
        there is, since these may go on without end.
        """
        if left <= budget or self._max_rows < 2 * _CUT or room < _CUT:
            return min(left, budget)
        return max(0, (start + budget) // _CUT * _CUT - start)

    def _fits(self, request: Request, rows: int) -> bool:
        return self._blocks.fit(request, _slots(request, rows))

    def _make_room(
        self, request: Request, rows: int, works: dict[str, Work], victims: Sequence[Request]
    ) -> bool:
        """Take the blocks, from the least important of `victims` if need be.

        False if the request lost its own.
        """
        while not self._blocks.grow(request, _slots(request, rows)):
            running = (r for r in victims if r.state is State.RUNNING)
            victim = max(running, key=lambda r: r.importance)
            self._preempt(victim)
            works.pop(victim.id, None)
            if victim is request:
                return False
        return True

    def look_ahead(self, request: Request, drafts: int) -> int:
        """How many of so many drafts there are slots for, taking free blocks if there are any."""
        self._blocks.grow(request, len(request.tokens) + drafts)
        slots = len(request.blocks) * self.pool.block_size
        return max(0, min(drafts, slots - len(request.tokens)))

    def _preempt(self, victim: Request) -> None:
        """Take a request's memory; it waits, and is read again with what it has said so far."""
        self.running.remove(victim)
        self._give_back(victim)
        victim.reset()
        self.waiting.append(victim)
        self._restarted.append(victim)
        victim.stats.num_preemptions += 1
        self.num_preemptions += 1

    def take_restarted(self) -> list[Request]:
        """Requests that lost their memory since the last time this was asked."""
        taken, self._restarted = self._restarted, []
        return taken

    def _admit(self, works: dict[str, Work], budget: int, room: int) -> None:
        """Let requests that wait begin, the most important first, until one does not fit."""
        for request in self.waiting:
            request.waited_steps += 1
        num_reserved = 0  # places of requests that wait for what others read
        for request in sorted(self.waiting, key=lambda r: r.importance):
            if len(self.running) + num_reserved >= self._max_running:
                return
            found = self._blocks.find(request)
            hit: list[int] | None = found
            if self.states is not None:
                hit = self.states.begin(request, found)
            elif self._blocks.is_being_read(request, found, self.running):
                num_reserved += 1
                continue
            if hit is None:  # no slot is left for its states
                return
            self._blocks.begin(request, hit)
            rows = self._rows(request, budget, room, is_first=not works)
            if rows < 1 or not self._fits(request, rows):
                self._give_back(request)
                request.blocks, request.num_computed, request.num_cached = [], 0, 0
                return
            self._make_room(request, rows, works, ())
            request.num_registered = len(hit)
            request.state = State.RUNNING
            if request.stats.queue_seconds is None:
                request.stats.queue_seconds = time.perf_counter() - request.created
            self.waiting.remove(request)
            self._blocks.forget(request)
            self.running.append(request)
            works[request.id] = _work(request, rows)
            budget -= rows

    def register(self, request: Request, num_final: int) -> None:
        """Make blocks findable whose first `num_final` slots are final in trunk and head."""
        if not self.pool.is_caching:
            return
        size = self.pool.block_size
        full = num_final // size
        extend_digests(request.digests, request.tokens, full, size, request.cache_root)
        for index in range(request.num_registered, full):
            self.pool.register(request.blocks[index], request.digests[index])
        request.num_registered = max(request.num_registered, full)

    def check(self) -> None:
        """Raise if blocks and requests disagree."""
        self.pool.check([request.blocks for request in self.running])
        if self.states is not None:
            held = [slot for request in self.running for slot in request.states.held]
            self.states.pool.check(held)


def _slots(request: Request, rows: int) -> int:
    """Slots of a request that so many more rows, and the token they give, need in all."""
    return request.num_computed + rows + 1


def _work(request: Request, rows: int) -> Work:
    drafts = tuple(request.drafts[: rows - 1]) if request.is_decoding else ()
    return Work(request, request.num_computed, rows, drafts)
