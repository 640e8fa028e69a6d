"""The part of a step that is about requests on the device: launch a round, hand out the last one.

The device gets its next round first. While it works the host hands out what the round before gave,
and makes the masks that the round under way waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headstart.backends.base import Backend, TrunkOutput, TrunkRows
from headstart.engine.draft_sources import DraftSources
from headstart.engine.flight import RoundOutcome
from headstart.engine.options import MAX_DRAFTS
from headstart.engine.output import Update, deliver
from headstart.engine.request import Request, origins
from headstart.engine.rounds import GivenCopies, Rounds
from headstart.engine.scheduler import Scheduler
from headstart.engine.stats import StepTimes
from headstart.engine.verifier import Verdict


class Advanced(NamedTuple):
    """What became of one step's rounds."""

    updates: list[Update]
    requests: list[Request]  # that these are for
    read: TrunkOutput | None  # of rows outside rounds, where they were read meanwhile
    is_launched: bool  # False: there was no memory for the next round


class RoundSteps:
    """What steps of one engine do with its rounds; `Loop` does everything else of a step."""

    def __init__(
        self, scheduler: Scheduler, backend: Backend, sources: DraftSources | None,
        times: StepTimes,
    ):  # fmt: skip
        self._scheduler, self._backend = scheduler, backend
        self._sources, self._times = sources, times

    def advance(
        self, rounds: Rounds, rows: Sequence[TrunkRows], meanwhile: Callable[[], None] | None
    ) -> Advanced:
        """Launch the next round, which `rows` of others may join, and hand out the last one.

        `meanwhile` is called when the device has that round: the host would only wait then.
        """
        updates: list[Update] = []
        read: TrunkOutput | None = None
        try:
            drafts, copies = self._choose_drafts(rounds)
            outcomes, is_launched = rounds.advance(drafts, rows, copies, meanwhile)
            # Before texts are made: the round under way waits for masks behind these tokens.
            taken = list(zip(outcomes, rounds.accept(outcomes), strict=True))
            rounds.begin_masks(_stuck(outcomes))
            if rows and rounds.joined is None and rounds.is_waiting:
                # The device reads prompts while the host makes masks, and the choice comes then.
                read = self._backend.trunk_pass(rows)
            while rounds.is_drafting and len(updates) < len(taken):
                updates.append(self._take(*taken[len(updates)]))
        finally:
            rounds.complete()
        self._times.round(rounds.measured)
        updates += [self._take(*each) for each in taken[len(updates) :]]
        requests = [outcome.request for outcome in outcomes]
        return Advanced(updates, requests, read or rounds.joined, is_launched)

    def _choose_drafts(self, rounds: Rounds) -> tuple[dict[Request, int], GivenCopies | None]:
        """Drafts of the next round for each request, and what may be copied."""
        if self._sources is None or not rounds.requests:
            return {}, None
        num_running = len(self._scheduler.running)
        found = self._sources.for_rounds(list(rounds.requests), num_running)
        self._times.stats.draft_reason = self._sources.policy.reason
        return found

    def _take(self, outcome: RoundOutcome, grammar_tokens: int) -> Update:
        """Hand out what a round gave one request, whose grammar has accepted so many tokens."""
        request, emitted = outcome.request, outcome.emitted
        num_accepted = len(emitted.tokens) - 1
        if outcome.num_of_head is not None:
            request.num_of_head = outcome.num_of_head
        verdict = Verdict(
            emitted.tokens, list(origins(num_accepted, outcome.num_drafts, request.num_of_head)),
            num_accepted, outcome.num_drafts, emitted.logprobs, grammar_tokens,
        )  # fmt: skip
        # The round began with these in trunk and head.
        num_final = len(request.tokens) - outcome.num_unread
        update = deliver(request, verdict, self._times.stats, None, self._sources)
        request.num_of_head = MAX_DRAFTS
        request.num_computed = len(request.tokens) - 1
        self._scheduler.register(request, min(num_final, request.num_computed))
        return update

    def prepare_next(self, rounds: Rounds, done: Advanced) -> None:
        """When requests that ended have left: what the others could copy in the round after.

        Where there was no memory all go on with the host, and the scheduler decides which ones.
        """
        if self._sources is not None:
            self._sources.look_ahead([r for r in done.requests if r in rounds.requests])
        if done.is_launched:
            return
        drafter = self._sources.drafter if self._sources is not None else None
        for request, states in rounds.drain().items():
            if drafter is not None and states is not None:
                drafter.restore(request, states)


def _stuck(outcomes: Sequence[RoundOutcome]) -> set[Request]:
    """Requests that nothing was allowed for: how they end is asked of their grammars."""
    return {outcome.request for outcome in outcomes if any(t < 0 for t in outcome.emitted.tokens)}
