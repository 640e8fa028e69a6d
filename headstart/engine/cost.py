"""What a round costs by batch size and number of drafts: measured at start, interpolated.

Whole rounds are timed, with as many requests as the batch has: the same rows in one request
would lack the spans, the sampling and the Python that each request brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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
_BUDGET_SECONDS = 1.5  # larger batches than fit into this are extrapolated
_CONTEXT = 32  # tokens of context while measuring, where there is room for them


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a verification by batch and drafts per request, and of a draft step by batch."""

    verify: Surface  # batch -> (drafts per request, seconds)
    draft: Curve

    def verify_seconds(self, batch: int, rows: int) -> float:
        """One trunk pass over `rows` rows of `batch` requests, and the decision."""
        return surface_at(self.verify, batch, rows / batch - 1)

    def draft_seconds(self, batch: int) -> float:
        """One token drafted for each of `batch` requests; nothing for none."""
        return curve_at(self.draft, batch) if batch else 0.0

    def round_seconds(self, batch: int, drafts: int) -> float:
        """A round in which every request has the same number of drafts."""
        verification = self.verify_seconds(batch, batch * (drafts + 1))
        return verification + drafts * self.draft_seconds(batch)


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
) -> RoundCosts:
    """Time rounds of blank requests; K/V memory is scratch before the first request."""
    profile = _Profile(runner, drafter, num_blocks, max_rows, one_by_one)
    verification: list[tuple[int, Curve]] = []
    draft: list[tuple[int, float]] = []
    spent = last = 0.0
    for batch in [size for size in _BATCHES if size == 1 or size <= max_batch]:
        drafts = [count for count in MENU if profile.has_room(batch, count)]
        if drafts in ([], [0]) or spent + 2 * last > _BUDGET_SECONDS:
            break
        started = time.perf_counter()
        curve = [(count, profile.verify_seconds(batch, count)) for count in drafts]
        verification.append((batch, tuple(curve)))
        draft.append((batch, profile.draft_seconds(batch)))
        last = time.perf_counter() - started
        spent += last
    if not verification:
        return NEVER_PAYS
    return RoundCosts(levelled(verification), level(draft))


class _Profile:
    def __init__(
        self, runner: Runner, drafter: Drafter, num_blocks: int, max_rows: int, one_by_one: bool
    ):
        self._runner, self._drafter, self._one_by_one = runner, drafter, one_by_one
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
        requests = self._blank(batch, drafts)
        states = None
        if self._runner.num_states:  # slots are scratch, too
            states = StateRows(0, tuple((row + 1, 0) for row in range(drafts + 1)))
        works = [Work(r, self._context, drafts + 1, (0,) * drafts, states) for r in requests]

        def check() -> None:
            verify(works, self._runner.trunk(works)[1], one_by_one=self._one_by_one)

        return self._seconds(check)

    def draft_seconds(self, batch: int) -> float:
        requests = self._blank(batch, 1)
        hidden = self._runner.trunk_model.config.hidden
        states = torch.zeros(1, hidden, dtype=self._runner.dtype, device=self._runner.device)
        vocabs = {name: len(vocab.ids) for name, vocab in self._runner.draft_vocabs.items()}
        largest = max(vocabs, key=lambda name: vocabs[name], default=None)

        def draft() -> None:
            for request in requests:
                request.draft_vocab = largest  # what a draft costs at most
                request.head.done = [self._context] * self._modules
                request.head.states = [states] * self._modules
            self._drafter.propose(dict.fromkeys(requests, 1))

        return self._seconds(draft)

    def _blank(self, batch: int, drafts: int) -> list[Request]:
        """Requests of blank tokens, sampled as most are, that own the first blocks."""
        each, requests = self._blocks_each(drafts), []
        for number in range(batch):
            request = Request(
                f"cost/{number}", [0] * (self._context + 1), SamplingParams(temperature=1), 0, 1,
                frozenset(), number,
            )  # fmt: skip
            request.num_computed = self._context
            request.blocks = list(range(number * each, (number + 1) * each))
            requests.append(request)
        return requests

    def _seconds(self, run: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + _REPEATS):
            started = time.perf_counter()
            run()
            if self._runner.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times[1:])
