"""The main loop: one step advances every running request by one verified chunk.

That is rows of prompt, or the newest token and its drafts. What is emitted is the trunk's own
choice, always; drafts only decide how many tokens a step gives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.drafter import Drafter
from headstart.engine.emission import emit, update_since
from headstart.engine.head_track import HeadTrack
from headstart.engine.options import EngineOptions
from headstart.engine.outputs import Update
from headstart.engine.request import Request
from headstart.engine.runner import Runner
from headstart.engine.scheduler import Scheduler, Work
from headstart.engine.stats import EngineStats
from headstart.engine.verifier import Verdict, verify


class Loop:
    """Scheduler, trunk, verifier and head, one after another; knows requests, not their users."""

    def __init__(
        self,
        options: EngineOptions,
        scheduler: Scheduler,
        runner: Runner,
        drafter: Drafter | None,
        speculation: DraftPolicy | None,
    ):
        self.options, self.scheduler, self.runner = options, scheduler, runner
        self.drafter, self.speculation = drafter, speculation
        self.stats = EngineStats()

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Advance every running request by one verified chunk."""
        plan = self.scheduler.plan()  # who runs, how many rows each, which blocks
        if not plan:
            return []
        self._resume_hits(plan)
        started = time.perf_counter()
        states, logits = self.runner.trunk(plan)  # one pass over prompts, newest tokens and drafts
        # accepted drafts, then a recovered or bonus token
        verdicts = self._decide(plan, logits)
        self._time_trunk(plan, time.perf_counter() - started)
        updates = [
            update
            for work, rows in zip(plan, states, strict=True)
            if (update := self._commit(work, rows, verdicts.get(work.request.id))) is not None
        ]
        decided = [work.request for work in plan if work.request.id in verdicts]
        self._draft(decided)
        self._release_siblings(decided)
        self._retire()
        self.stats.steps += 1
        return updates

    def _decide(self, plan: Sequence[Work], logits: torch.Tensor) -> dict[str, Verdict]:
        return verify(plan, logits, one_by_one=self.options.exact, chooser=self.runner.chooser)

    def _resume_hits(self, plan: Sequence[Work]) -> None:
        """Requests that begin after a prefix hit take up the head where the hit ends."""
        for work in plan:
            request = work.request
            if request.num_cached and request.num_cached == work.start and not request.head.done:
                request.stats.num_cached_tokens += request.num_cached
                self.stats.cached_tokens += request.num_cached
                if self.drafter is not None and not request.is_headless:
                    self.drafter.resume(request)

    def _time_trunk(self, plan: Sequence[Work], seconds: float) -> None:
        self.stats.trunk_seconds += seconds
        if self.speculation is not None and all(w.request.is_decoding for w in plan):
            requests = [work.request for work in plan]
            self.speculation.observe_verify(requests, sum(w.count for w in plan), seconds)

    def _commit(self, work: Work, rows: torch.Tensor, verdict: Verdict | None) -> Update | None:
        """Take over what a step decided for one request."""
        request = work.request
        valid = (
            work.count if verdict is None else work.count - len(work.drafts) + verdict.num_accepted
        )
        request.num_computed = work.start + valid
        if self.drafter is not None and not request.is_headless:
            self.drafter.feed(request, work.start, rows[:valid])
        self.stats.prompt_tokens += max(0, min(work.stop, request.num_prompt) - work.start)
        request.drafts = []
        update = self._deliver(request, verdict) if verdict is not None else None
        if self.scheduler.states is not None:
            self.scheduler.states.settle(work, valid)
        self._register(request)
        return update

    def _deliver(self, request: Request, verdict: Verdict) -> Update:
        """Hand out what was decided, and count it."""
        before = request.num_output
        emit(request, verdict)
        new = request.num_output - before
        self.stats.output_tokens += new
        if before:
            # Drafts behind a stop were right for nothing: they do not count as accepted.
            self._observe(request, verdict.num_drafts, min(verdict.num_accepted, new))
        elif request.stats.first_token_seconds is None:
            request.stats.first_token_seconds = time.perf_counter() - request.created
        return update_since(request, before)

    def _observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        request.stats.acceptance.observe(num_drafts, num_accepted)
        self.stats.acceptance.observe(num_drafts, num_accepted)
        chosen = self.stats.chosen_drafts
        chosen[num_drafts] = chosen.get(num_drafts, 0) + 1
        if self.speculation is not None:
            self.speculation.observe(request, num_drafts, num_accepted)

    def _draft(self, decided: list[Request]) -> None:
        """Let the head catch up with the trunk, and guess for those who got a token and go on."""
        if self.drafter is None or self.speculation is None:
            return
        started = time.perf_counter()
        going = [r for r in self.scheduler.running if r.finish_reason is None]
        chosen = self.speculation.choose(
            [r for r in decided if r.finish_reason is None], num_running=len(going)
        )
        drafting = {
            request: drafts
            for request, wanted in chosen.items()
            if wanted and (drafts := self.scheduler.look_ahead(request, wanted))
        }
        # A head that reads a prompt, or what came while nobody drafted, says nothing about drafts.
        is_usual = not self.drafter.is_behind(drafting, by=self.options.max_drafts + 1)
        drafting_started = time.perf_counter()
        self.drafter.propose(drafting)
        if is_usual:
            self.speculation.observe_drafts(drafting, time.perf_counter() - drafting_started)
        self.drafter.catch_up([r for r in going if r not in drafting])
        self.stats.draft_reason = self.speculation.reason
        self.stats.draft_seconds += time.perf_counter() - started

    def _register(self, request: Request) -> None:
        """Blocks whose trunk and head entries are final may serve others."""
        final = request.num_computed
        if self.drafter is not None and not request.is_headless:
            final = min(final, self.drafter.num_final(request))
        self.scheduler.register(request, final)

    def _release_siblings(self, decided: list[Request]) -> None:
        """Samples that waited for the first one to read the prompt may find it cached now."""
        for request in decided:
            if self.scheduler.has_siblings(request):
                self._register_all(request)
                self.scheduler.release_siblings(request)

    def _register_all(self, request: Request) -> None:
        if self.drafter is not None and self.options.prefix_caching:
            self.drafter.catch_up([request], force=True)
            self._register(request)

    def _retire(self) -> None:
        for request in [r for r in self.scheduler.running if r.finish_reason is not None]:
            self._register_all(request)
            self._close(request)
            self.stats.finished += 1
            self.stats.failed += request.finish_reason == "error"
        self.stats.preemptions = self.scheduler.num_preemptions

    def _close(self, request: Request) -> None:
        request.stats.total_seconds = time.perf_counter() - request.created
        self.scheduler.remove(request)
        # A result may wait long for its collector; what the device holds for it must not.
        request.head, request.draft_probs = HeadTrack(), None
        if self.speculation is not None:
            self.speculation.forget(request)

    def abort(self, request: Request) -> None:
        """End a request now; its memory is free at once."""
        request.finish_reason = "abort"
        self._close(request)
        self.stats.aborted += 1
