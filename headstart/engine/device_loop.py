"""The main loop on a GPU: most requests decode on the device, one round ahead of the host.

A step launches a round for everybody who sits, then reads what the round before gave, while the
device works. Prompts are read as always, and so are requests that need the host for every token
(grammars, penalties, log-probabilities, truncation, ...): those are not seated.
"""

from __future__ import annotations

from typing import Any

import torch

from headstart.engine.head_track import HeadTrack
from headstart.engine.loop import Loop
from headstart.engine.outputs import Update
from headstart.engine.request import Request, State
from headstart.engine.seating import Outcome, Seating
from headstart.engine.verifier import Verdict
from headstart.sampling.acceptance import origins


class DeviceLoop(Loop):
    def __init__(self, *parts: Any, seating: Seating, draft_vocab: str | None):
        super().__init__(*parts)
        self.seating, self._draft_vocab = seating, draft_vocab

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Start the next round, hand out the last one, and do what only the host can."""
        before = self.seating.take_flight()
        is_launched = self.seating.launch(self._chosen())  # the device goes on at once
        updates = [
            update
            for outcome in self.seating.results(before)
            if (update := self._take(outcome)) is not None
        ]
        self._retire()
        if not is_launched:
            self.seating.stand_up()  # memory is short: the host decides who goes on
        return updates + super().step()  # prompts, and requests that are not seated

    def _chosen(self) -> dict[Request, int]:
        """Drafts of everybody who sits."""
        if self.speculation is None or not self.seating.taken:
            return {}
        going = len(self.scheduler.running)
        return self.speculation.choose(list(self.seating.taken.values()), num_running=going)

    def _take(self, outcome: Outcome) -> Update | None:
        """Hand out what a round gave one request, unless it has ended since."""
        request, tokens = outcome.request, outcome.tokens
        if request.state is not State.RUNNING or request.seat is None:
            return None
        num_accepted = len(tokens) - 1
        verdict = Verdict(
            tokens, list(origins(num_accepted, outcome.num_drafts)), num_accepted,
            outcome.num_drafts, [],
        )  # fmt: skip
        num_final = len(request.tokens)  # the round began with these in trunk and head
        update = self._deliver(request, verdict)
        request.num_computed = len(request.tokens) - 1
        self.scheduler.register(request, min(num_final, request.num_computed))
        return update

    def _draft(self, decided: list[Request]) -> None:
        """Who can sit does; the others draft with the host's help."""
        ready = [r for r in decided if r.finish_reason is None and self._may_sit(r)]
        if not self.seating.has_room(len(ready)):
            ready = []
        if ready:
            self._seat(ready)
        super()._draft([request for request in decided if request.seat is None])

    def _may_sit(self, request: Request) -> bool:
        """Whether a round needs nothing but logits and noise to choose for this request."""
        params = request.params
        is_truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return (
            request.grammar is None
            and params.acceptance == "match"
            and params.logprobs is None
            and not params.needs_history
            and not params.logit_bias
            and params.allowed_token_ids is None
            and not params.banned_token_ids
            and (params.is_greedy or not is_truncated)
            and (self.drafter is None or request.draft_vocab == self._draft_vocab)
        )

    def _seat(self, requests: list[Request]) -> None:
        """The head reads everything before the newest token; the rest is the device's."""
        states: dict[Request, torch.Tensor | None] = dict.fromkeys(requests)
        if self.drafter is not None:
            states = {r: r.head.states[0][-1].clone() for r in requests}
            self.drafter.catch_up(requests, force=True)
            for request in requests:
                self._register(request)
        chosen: dict[Request, int] = {}
        if self.speculation is not None:
            chosen = self.speculation.choose(requests, num_running=len(self.scheduler.running))
        for request in requests:
            request.head = HeadTrack()
            self.seating.sit(request, chosen.get(request, 0), states[request])

    def _close(self, request: Request) -> None:
        if request.seat is not None:
            self.seating.leave(request)
        super()._close(request)
