"""Where the drafts of a round come from: the head, the request's own context, or both.

The policy decides which, for every request and round. What was drafted never shows in the text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from headstart.backends.base import Backend, GivenCopy
from headstart.copying.drafts import Copy
from headstart.engine.auto.copies import PlannedRound
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.copies import ContextDrafter
from headstart.engine.drafter import Drafter
from headstart.engine.options import MAX_DRAFTS
from headstart.engine.request import Request
from headstart.engine.rounds import GivenCopies
from headstart.engine.scheduler import Scheduler

AHEAD = 2 * (MAX_DRAFTS + 1)  # tokens of a copy for a round that starts behind another


@dataclass
class DraftSources:
    """All that drafts for requests of one engine; `drafter` where there is a head."""

    backend: Backend
    scheduler: Scheduler
    policy: DraftPolicy
    copies: ContextDrafter
    drafter: Drafter | None = None
    max_drafts: int = MAX_DRAFTS  # of the head
    index_seconds: float = 0.0  # that indexing prompts as they are read took so far,
    copy_seconds: float = 0.0  # that finding copies took, which indexes everything else,
    # and in rounds that the host drives all but the head's part: to choose, and to learn from it
    deciding_seconds: float = 0.0

    def draft(self, requests: Sequence[Request], going: Sequence[Request]) -> float:
        """Drafts for these requests, of all that go on; the seconds that the head took."""
        started = time.perf_counter()
        copies = self._find_copies(requests)
        planned = self.policy.plan(requests, len(going), copies)
        seconds = 0.0
        if self.drafter is not None:
            seconds = self._draft_by_head(self.drafter, planned.head, going)
        for request, copy in copies.items():
            self._copy(request, copy, planned)
        self.deciding_seconds += time.perf_counter() - started - seconds
        return seconds

    def read(self, request: Request, count: int) -> None:
        """A step has read `count` tokens more of a request's prompt."""
        started = time.perf_counter()
        self.copies.read(request, count)
        self.index_seconds += time.perf_counter() - started

    def look_ahead(self, requests: Sequence[Request]) -> None:
        """What requests in device rounds could copy, by the tokens that the host knows."""
        started = time.perf_counter()
        self.copies.find_all(requests, lambda request: min(AHEAD, self.policy.room(request)))
        self.copy_seconds += time.perf_counter() - started

    def for_rounds(
        self, requests: Sequence[Request], num_running: int
    ) -> tuple[dict[Request, int], GivenCopies]:
        """Drafts of the next device round: of the head, and what may be copied instead."""
        copies = {
            request: copy
            for request in requests if (copy := self.copies.found(request)) is not None
        }  # fmt: skip
        planned = self.policy.plan_round(requests, num_running, copies)
        given = {
            request: GivenCopy(
                len(request.tokens), self._tokens_for_round(request, copies[request]),
                confirmed=request in planned.confirmed or _is_judged_by_head(request, planned),
            )
            for request in planned.copied
        }  # fmt: skip
        most = max(planned.copied.values(), default=0)
        return planned.head, GivenCopies(given, most, planned.num_rows)

    def _tokens_for_round(self, request: Request, copy: Copy) -> list[int]:
        """As many tokens as a request may draft, and one: the round under way gives it at least."""
        most = self.policy.most_copied(request)
        return copy.tokens if most is None else copy.tokens[: most + 1]

    def _draft_by_head(
        self, drafter: Drafter, chosen: Mapping[Request, int], going: Sequence[Request]
    ) -> float:
        drafting = {
            request: drafts
            for request, wanted in chosen.items()
            if wanted and (drafts := self.scheduler.look_ahead(request, wanted))
        }
        # A head that reads a prompt, or what came without drafts, says nothing about draft costs.
        is_usual = not drafter.is_behind(drafting, by=self.max_drafts + 1)
        started = time.perf_counter()
        drafter.propose(drafting)
        if is_usual:
            self.policy.observe_drafts(drafting, time.perf_counter() - started)
        drafter.catch_up([r for r in going if r not in drafting])
        return time.perf_counter() - started

    def _find_copies(self, requests: Sequence[Request]) -> dict[Request, Copy]:
        """What requests would go on with if they copied from their context."""
        started = time.perf_counter()
        found = self.copies.find_all(
            requests, lambda request: min(MAX_DRAFTS, self.policy.room(request))
        )
        self.copy_seconds += time.perf_counter() - started
        return found

    def _copy(self, request: Request, copy: Copy, planned: PlannedRound) -> None:
        """Draft what is copied, in place of the head's drafts or after those that agree with it."""
        of_head = len(request.drafts)
        wanted = planned.copied.get(request, 0)
        if of_head and request.drafts == copy.tokens[:of_head]:
            wanted = of_head + self.policy.more_copied(request, copy, planned)
        if wanted > of_head:
            wanted = self.scheduler.look_ahead(request, wanted)
            request.drafts = [*request.drafts, *copy.tokens[of_head:wanted]]
            request.num_of_head = of_head

    def probs(self, request: Request) -> torch.Tensor:
        """[K, V] what a request's drafts were drawn from: copied ones could be nothing else."""
        if self.drafter is not None and request.num_of_head >= len(request.drafts):
            return self.drafter.probs(request)
        copied = torch.tensor(request.drafts[request.num_of_head :], dtype=torch.int64)
        probs = one_hot(copied, self.backend.config.vocab).float().to(self.backend.device)
        if self.drafter is None or not request.num_of_head:
            return probs
        return torch.cat([self.drafter.probs(request).to(probs.dtype), probs])

    def observe(
        self, request: Request, num_drafts: int, num_accepted: int, emitted: list[int]
    ) -> None:
        """What became of a request's drafts, and of what it could have copied."""
        started = time.perf_counter()
        of_head = request.num_of_head
        self.policy.observe(request, min(num_drafts, of_head), min(num_accepted, of_head))
        copy = self.copies.take(request)
        if copy is not None:
            head = request.drafts[:of_head]
            confirmed = bool(head) and head == copy.tokens[: len(head)]
            self.policy.observe_copy(request, copy, emitted, confirmed=confirmed)
        self.deciding_seconds += time.perf_counter() - started

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self.drafter is not None:
            self.drafter.forget(request)
        self.policy.forget(request)
        self.copies.forget(request)


def _is_judged_by_head(request: Request, planned: PlannedRound) -> bool:
    """Whether the rejection rule must see the head's draft first.

    It judges a draft by how likely the head was to make it. A copy in place of the head's drafts
    would be judged so only where both agree, and be accepted too often.
    """
    return request.params.acceptance == "rejection" and planned.head.get(request, 0) > 0
