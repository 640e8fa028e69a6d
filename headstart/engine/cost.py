"""What a round costs by batch size and number of drafts: measured at start, interpolated.

Whole rounds are timed, with as many requests as the batch has: the same rows in one request
would lack the spans, the sampling and the Python that each request brings. Rounds of greedy
requests are timed by themselves: a draw among all tokens can take longer than a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headstart.engine.curves import Curve, Surface, curve_at, level, levelled, surface_at
from headstart.engine.draft_choice import MENU
from headstart.engine.drafter import Drafter
from headstart.engine.request import Request
from headstart.engine.runner import Runner
from headstart.engine.scheduler import Work
from headstart.engine.state_pool import StateRows
from headstart.engine.verifier import verify
from headstart.sampling.params import SamplingParams

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 3
_QUICK_SECONDS = 0.05  # a round in which the choice of tokens counts
_BUDGET_SECONDS = 1.0  # larger batches than fit into this are extrapolated,
_LEAST_BATCH = 8  # but of quick rounds not from smaller ones: that batching pays must be seen
SAMPLED, GREEDY = SamplingParams(temperature=1), SamplingParams(temperature=0)
_CONTEXT = 32  # tokens of context while measuring, where there is room for them


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a verification by batch and drafts per request, and of drafting by batch."""

    verify: Surface  # batch -> (drafts per request, seconds)
    draft: Curve  # of each draft step
    start: Curve = ((1, 0.0),)  # of drafting at all

    def verify_seconds(self, batch: int, rows: int) -> float:
        """One trunk pass over `rows` rows of `batch` requests, and the decision."""
        return surface_at(self.verify, batch, rows / batch - 1)

    def draft_seconds(self, batch: int) -> float:
        """One token drafted for each of `batch` requests; nothing for none."""
        return curve_at(self.draft, batch) if batch else 0.0

    def start_seconds(self, batch: int) -> float:
        """What drafting takes besides its steps, if anybody drafts."""
        return curve_at(self.start, batch) if batch else 0.0

    def round_seconds(self, batch: int, drafts: int) -> float:
        """A round in which every request has the same number of drafts."""
        verification = self.verify_seconds(batch, batch * (drafts + 1))
        drafting = self.start_seconds(batch) if drafts else 0.0
        return verification + drafting + drafts * self.draft_seconds(batch)


# Where there is no room to measure anything, a draft costs what it could save at best.
NEVER_PAYS = RoundCosts(((1, ((0, 1.0),)),), ((1, 1.0),))


def measure(
    runner: Runner,
    drafter: Drafter,
    *,
    num_blocks: int,
    max_batch: int,
    max_rows: int,
    one_by_one: bool = False,
    params: SamplingParams = SAMPLED,
) -> RoundCosts:
    """Time rounds of blank requests; K/V memory is scratch before the first request."""
    profile = _Profile(runner, drafter, num_blocks, max_rows, one_by_one, params)
    verification: list[tuple[int, Curve]] = []
    draft: list[tuple[int, float]] = []
    start: list[tuple[int, float]] = []
    spent = last = 0.0
    for batch in [size for size in _BATCHES if size == 1 or size <= max_batch]:
        drafts = [count for count in MENU if profile.has_room(batch, count)]
        if spent + 2 * last > _BUDGET_SECONDS:
            # A few numbers of drafts say enough of the one batch that is still timed.
            is_quick = verification[0][1][0][1] < _QUICK_SECONDS
            drafts = drafts[:3] if batch == _LEAST_BATCH and is_quick else []
            if batch < _LEAST_BATCH:
                continue
        if drafts in ([], [0]):
            break
        started = time.perf_counter()
        curve = [(count, profile.verify_seconds(batch, count)) for count in drafts]
        verification.append((batch, tuple(curve)))
        one, several = profile.draft_seconds(batch, 1), profile.draft_seconds(batch, drafts[-1])
        step = max(0.0, several - one) / (drafts[-1] - 1) if drafts[-1] > 1 else one
        draft.append((batch, step))
        start.append((batch, max(0.0, one - step)))
        last = time.perf_counter() - started
        spent += last
    if not verification:
        return NEVER_PAYS
    return RoundCosts(levelled(verification), level(draft), level(start))


def measure_both(
    runner: Runner, drafter: Drafter, **sizes: Any
) -> tuple[RoundCosts, RoundCosts | None]:
    """Costs of sampled and of greedy requests; of a slow model both are the same."""
    sampled = measure(runner, drafter, **sizes)
    is_quick = sampled is not NEVER_PAYS and sampled.round_seconds(1, 0) < _QUICK_SECONDS
    return sampled, measure(runner, drafter, params=GREEDY, **sizes) if is_quick else None


class _Profile:
    def __init__(
        self, runner: Runner, drafter: Drafter, num_blocks: int, max_rows: int, one_by_one: bool,
        params: SamplingParams,
    ):  # fmt: skip
        self._runner, self._drafter, self._one_by_one = runner, drafter, one_by_one
        self._params = params
        self._num_blocks, self._max_rows = num_blocks, max_rows
        self._modules = runner.head.num_modules if runner.head is not None else 0
        self._longest = min(num_blocks * runner.block_size, runner.trunk_model.rotary.num_positions)
        self._context = max(self._modules + 1, min(_CONTEXT, self._longest // 2))

    def _blocks_each(self, drafts: int) -> int:
        return -(-(self._context + drafts + 2) // self._runner.block_size)

    def has_room(self, batch: int, drafts: int) -> bool:
        return (
            self._context + drafts + 2 <= self._longest
            and batch * self._blocks_each(drafts) <= self._num_blocks
            and batch * (drafts + 1) <= self._max_rows
        )

    def verify_seconds(self, batch: int, drafts: int) -> float:
        works = self._works(self._blank(batch, drafts), drafts)

        def check() -> None:
            logits = self._runner.trunk(works)[1]
            verify(works, logits, one_by_one=self._one_by_one, chooser=self._runner.chooser)

        return self._seconds(check)

    def _works(self, requests: Sequence[Request], drafts: int) -> list[Work]:
        states = None
        if self._runner.num_states:  # slots are scratch, too
            states = StateRows(0, tuple((row + 1, 0) for row in range(drafts + 1)))
        return [Work(r, self._context, drafts + 1, (0,) * drafts, states) for r in requests]

    def draft_seconds(self, batch: int, drafts: int) -> float:
        requests = self._blank(batch, drafts)
        runner = self._runner
        size = (self._modules, runner.trunk_model.config.hidden)
        boundary = torch.zeros(size, dtype=runner.dtype, device=runner.device)
        vocabs = {name: len(vocab.ids) for name, vocab in runner.draft_vocabs.items()}
        largest = max(vocabs, key=lambda name: vocabs[name], default=None)

        def draft() -> None:
            for request in requests:
                request.draft_vocab = largest  # what a draft costs at most
                request.head.resume(self._context, boundary, parallel=runner.is_parallel)
            self._drafter.propose(dict.fromkeys(requests, drafts))

        works = self._works(requests, 0)
        return self._seconds(draft, before=lambda: runner.trunk(works))

    def _blank(self, batch: int, drafts: int) -> list[Request]:
        """Requests of blank tokens that own the first blocks."""
        each, requests = self._blocks_each(drafts), []
        for number in range(batch):
            request = Request(
                f"cost/{number}", [0] * (self._context + 1), self._params, 0, 1, frozenset(),
                number,
            )  # fmt: skip
            request.num_computed = self._context
            request.blocks = list(range(number * each, (number + 1) * each))
            requests.append(request)
        return requests

    def _seconds(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> float:
        """`before` is not timed, but leaves the caches of the processor as they are in a round."""
        times = []
        for _ in range(1 + _REPEATS):
            if before is not None:
                before()
                self._wait()
            started = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def _wait(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize()
