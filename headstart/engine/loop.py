"""The main loop: one step advances every running request by one verified chunk.

That is rows of prompt, or the newest token and its drafts. What is emitted is the trunk's own
choice, always; drafts only decide how many tokens a step gives. A backend that can run rounds by
itself decodes most requests ahead of the host (`RoundSteps`); the loop then reads prompts, and
decides for requests that need the host for every token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch

from headstart.backends.base import Backend, TrunkOutput, TrunkRows
from headstart.engine.draft_sources import DraftSources
from headstart.engine.options import MAX_DRAFTS, EngineOptions
from headstart.engine.output import Update, deliver, update_since
from headstart.engine.request import Request
from headstart.engine.round_steps import RoundSteps
from headstart.engine.rounds import Rounds
from headstart.engine.scheduler import Scheduler, Work
from headstart.engine.stats import EngineStats, StepTimes
from headstart.engine.verifier import Verdict, verify
from headstart.models.unroll import StateKind


class Loop:
    """Scheduler, trunk, verifier and head, one after another, over all running requests."""

    def __init__(
        self, options: EngineOptions, scheduler: Scheduler, backend: Backend,
        sources: DraftSources | None, rounds: Rounds | None = None,
    ):  # fmt: skip
        self.options, self.scheduler, self.backend = options, scheduler, backend
        self.sources, self.rounds = sources, rounds
        self.drafter = sources.drafter if sources is not None else None
        self.policy = sources.policy if sources is not None else None
        self.stats = EngineStats()
        self.times = StepTimes(self.stats, self.policy)
        self._round_steps = RoundSteps(scheduler, backend, sources, self.times)
        # Called in a step when the device has its next round: the host would only wait then.
        self.meanwhile: Callable[[], None] | None = None

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Advance every running request by one verified chunk."""
        self.times.begin()
        plan = self._plan()  # which requests, how many rows each, which blocks
        rows = [work.rows(feeds_head=self.drafter is not None) for work in plan]
        updates, read = self._step_rounds(rows)  # requests on the device; rows may join them
        if not plan:
            return updates
        started = time.perf_counter()
        # one pass over prompts, newest tokens and drafts
        states, logits = read or self.backend.trunk_pass(rows)
        self._score_prompts(plan, states)
        # accepted drafts, then a recovered or bonus token
        verdicts = self._decide(plan, logits)
        if read is None:
            requests, rows_run = [work.request for work in plan], sum(work.count for work in plan)
            self.times.trunk(requests, rows_run, time.perf_counter() - started)
        updates += [
            update
            for work, own in zip(plan, states, strict=True)
            if (update := self._commit(work, own, verdicts.get(work.request.id))) is not None
        ]
        decided = [work.request for work in plan if work.request.id in verdicts]
        self._enter_rounds()
        self._draft(decided)
        self._register_prompts(plan)
        self._release_siblings(decided)
        self._retire()
        if self.rounds is None:
            self.times.end()
        return updates

    def _plan(self) -> list[Work]:
        """The work of this step, of requests that do not decode on the device."""
        plan = self.scheduler.plan(self._in_rounds)
        self._forget_restarted()
        if self.rounds is not None and self.options.chunked_prefill:
            plan = self.rounds.fitting(plan)
        self._resume_hits(plan)
        return plan

    def _forget_restarted(self) -> None:
        for request in self.scheduler.take_restarted():
            if self.drafter is not None:
                self.drafter.forget(request)
            if self.sources is not None:  # it may go on elsewhere, where it must not copy
                self.sources.copies.take(request)

    def _resume_hits(self, plan: Sequence[Work]) -> None:
        """Requests that begin after a prefix hit take up the head where the hit ends."""
        for work in plan:
            request = work.request
            if request.num_cached and request.num_cached == work.start:
                request.stats.num_cached_tokens += request.num_cached
                self.stats.cached_tokens += request.num_cached
                if self.drafter is not None:
                    self.drafter.resume(request, at=request.num_computed)

    @property
    def _in_rounds(self) -> Collection[Request]:
        return self.rounds.requests if self.rounds is not None else ()

    def _step_rounds(self, rows: Sequence[TrunkRows]) -> tuple[list[Update], TrunkOutput | None]:
        """What the last round on the device gave, and what `rows` gave if they were read."""
        if self.rounds is None:
            return [], None
        done = self._round_steps.advance(self.rounds, rows, self.meanwhile)
        self._retire()
        self._round_steps.prepare_next(self.rounds, done)
        return done.updates, done.read

    def _score_prompts(self, plan: Sequence[Work], states: Sequence[torch.Tensor]) -> None:
        """Before anything is chosen: what is chosen then arrives later than the scores do."""
        for work, own in zip(plan, states, strict=True):
            if work.request.prompt_scores is not None and work.request.is_scoring:
                work.request.prompt_scores.read(self.backend, work.start, own)

    def _decide(self, plan: Sequence[Work], logits: torch.Tensor) -> dict[str, Verdict]:
        """The host's verdicts; first tokens of requests that enter rounds stay on the device."""
        works = [work for work in plan if work.needs_logits]
        if self.rounds is not None:
            works, logits = self.rounds.enter(works, logits)
        draft_probs = self.sources.probs if self.sources is not None else None
        return verify(works, logits, chooser=self.backend, draft_probs=draft_probs)

    def _commit(self, work: Work, rows: torch.Tensor, verdict: Verdict | None) -> Update | None:
        """Take over what a step decided for one request."""
        request = work.request
        valid = (
            work.count if verdict is None else work.count - len(work.drafts) + verdict.num_accepted
        )
        request.num_computed = work.start + valid
        if self.drafter is not None:
            self.drafter.feed(request, work.start, rows[:valid])
        if request.kept_states is not None:
            request.kept_states.read(work.start, rows[:valid])
        if self.sources is not None and work.start < request.num_prompt:
            self.sources.read(request, work.count)
        self.stats.prompt_tokens += max(0, min(work.stop, request.num_prompt) - work.start)
        update = None
        if verdict is not None:
            why_slow = self._why_slow(request)
            update = deliver(request, verdict, self.stats, why_slow, self.sources)
        request.drafts, request.num_of_head = [], MAX_DRAFTS
        if self.scheduler.states is not None:
            self.scheduler.states.settle(work, valid)
        self._register(request)
        return update

    def _why_slow(self, request: Request) -> str | None:
        """Why the host decides a request's tokens, where the backend could do better."""
        if self.rounds is None:
            return self.backend.why_slow
        return self.rounds.why_not(request) or "K/V memory is short"

    def _enter_rounds(self) -> None:
        """The head reads everything before the newest token; the rest is the device's."""
        if self.rounds is None or not (entering := self.rounds.entering):
            return
        states: dict[Request, torch.Tensor] = {}
        if self.drafter is not None:
            self.drafter.catch_up(entering, force=True)
            states = {request: self.drafter.newest_states(request) for request in entering}
        for request in entering:
            self._register(request)
            if self.drafter is not None:
                self.drafter.forget(request)
            self.rounds.admit(request, states.get(request))
        self._release_siblings(entering, is_registered=True)

    def _draft(self, decided: list[Request]) -> None:
        """Let the head catch up with the trunk, and draft for requests that go on here."""
        if self.sources is None:
            return
        started = time.perf_counter()
        going = [r for r in self.scheduler.running if r.finish_reason is None]
        of_head = self.sources.draft(self._drafting_here(decided), going)
        self.stats.draft_reason = self.sources.policy.reason
        self.times.drafts(of_head, time.perf_counter() - started)

    def _drafting_here(self, decided: list[Request]) -> list[Request]:
        """Requests that go on with the host; those that enter the rounds next draft there."""
        going = [r for r in decided if r.finish_reason is None]
        if self.rounds is None:
            return going
        entering = [r for r in going if self.rounds.takes(r)][: self.rounds.room()]
        return [r for r in going if r not in entering]

    def _register(self, request: Request) -> None:
        """Blocks whose trunk and head entries are final may serve other requests."""
        final = request.num_computed
        if self.drafter is not None:
            final = min(final, self.drafter.num_final(request))
        self.scheduler.register(request, final)

    def _register_prompts(self, plan: Sequence[Work]) -> None:
        """What the head has read in this step, too: requests that waited for it find it next."""
        in_rounds = self._in_rounds
        for work in plan if self.drafter is not None else ():
            request = work.request
            if work.start < request.num_prompt and request not in in_rounds:
                self._register(request)

    def _release_siblings(self, decided: list[Request], *, is_registered: bool = False) -> None:
        """Samples that waited for the first one to read the prompt may find it cached now."""
        for request in decided:
            if self.scheduler.has_siblings(request):
                if not is_registered:
                    self._register_whole(request)
                self.scheduler.release_siblings(request)

    def _register_whole(self, request: Request) -> None:
        """The same when the head has read all that it can."""
        if self.drafter is not None and self.options.prefix_caching:
            self.drafter.catch_up([request], force=True)
            self._register(request)

    def _retire(self) -> None:
        for request in [r for r in self.scheduler.running if r.finish_reason is not None]:
            if request not in self._in_rounds:
                self._register_whole(request)
            self._close(request)
            self.stats.finished += 1
            self.stats.failed += request.finish_reason == "error"
        self.stats.preemptions = self.scheduler.num_preemptions

    def _close(self, request: Request) -> None:
        if self.rounds is not None and request in self.rounds.requests:
            self.rounds.remove(request)
        request.stats.total_seconds = time.perf_counter() - request.created
        self.scheduler.remove(request)
        if self.sources is not None:
            self.sources.forget(request)

    def cut(self, request: Request, reason: str) -> Update:
        """End a request now with what it has."""
        request.finish_reason, request.stop_reason = "length", reason
        if request.text is not None:
            request.text.finish()
        self._close(request)
        self.stats.finished += 1
        return update_since(request, request.num_output)

    def abort(self, request: Request) -> None:
        """End a request now; its memory is free at once."""
        request.finish_reason, request.kept_states = "abort", None
        self._close(request)
        self.stats.aborted += 1

    @property
    def is_ahead(self) -> bool:
        """Whether a round is under way, whose outcome the next step hands out."""
        return self.rounds is not None and self.rounds.is_under_way

    @property
    def state_kind(self) -> StateKind | None:
        """Which of the trunk's states requests can keep; None where the host does not see them."""
        is_seen = self.rounds is None and self.backend.device.type == "cpu"
        head = self.backend.head if is_seen and self.drafter is not None else None
        return None if head is None else head.layout.trunk_hidden
