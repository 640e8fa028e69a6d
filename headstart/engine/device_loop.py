"""The main loop on a GPU: most requests decode on the device, one round ahead of the host.

A step launches a round for everybody who sits, then reads what the round before gave, while the
device works. Prompts are read as always, and so are requests that need the host for every token
(grammars, penalties, log-probabilities, top-p without top-k, ...): those are not seated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from headstart.backends.cuda.rounds import Kind, run_round
from headstart.engine.auto.blank_rounds import BlankRounds
from headstart.engine.auto.headless import Headless
from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.auto.profile import profile_captured_rounds
from headstart.engine.device_runner import DeviceRunner
from headstart.engine.head_rows import HeadRows
from headstart.engine.head_track import HeadTrack
from headstart.engine.loop import Loop
from headstart.engine.outputs import Update
from headstart.engine.request import Request, State
from headstart.engine.scheduler import Work
from headstart.engine.seatable import may_sit
from headstart.engine.seating import Flight, Outcome, Seating
from headstart.engine.verifier import Verdict
from headstart.sampling.acceptance import origins
from headstart.sampling.params import SamplingParams

_WARM_ROWS = 64  # of a pass that only compiles


class DeviceLoop(Loop):
    runner: DeviceRunner

    def __init__(self, *parts: Any, seating: Seating, draft_vocab: str | None):
        super().__init__(*parts)
        self.seating, self._draft_vocab = seating, draft_vocab
        self._firsts: Flight | None = None  # first tokens that the host has not seen
        self._chosen_first: dict[Request, torch.Tensor] = {}  # of this step, on the device
        self._headless: Headless | None = None
        if self.speculation is not None and self.options.speculate == "auto":
            # Not by a method of this loop: one that is dropped must not keep itself alive.
            most = seating.seats.max_drafts
            seats_it = partial(may_sit, draft_vocab=draft_vocab, max_drafts=most)
            self._headless = Headless(self.options, self.speculation, seats_it)
            self.scheduler.goes_headless = self._headless.goes_without

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Start the next round, hand out the last one, and do what only the host can."""
        before, firsts = self.seating.take_flight(), self._firsts
        self._firsts, self._chosen_first = None, {}  # the latter only after a step that failed
        is_launched = self.seating.launch(self._chosen())  # the device goes on at once
        outcomes = self.seating.results(before)
        self._time_round(before)
        if firsts is not None:  # tokens of prompts that were read after that round began
            outcomes += [Outcome(r, [firsts.rows()[at]], 0) for at, r in firsts.seats.items()]
        updates = [u for outcome in outcomes if (u := self._take(outcome)) is not None]
        self._retire()
        if not is_launched:
            self.seating.stand_up()  # memory is short: the host decides who goes on
        self._decide_heads()
        return updates + super().step()  # prompts, and requests that are not seated

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and capture before the first request; K/V memory is still scratch."""
        drafts = self.options.max_drafts if self.drafter is not None else 0
        choosing = self.speculation if self.options.speculate == "auto" else None
        blank = BlankRounds(self.seating)
        kinds = self.seating.kinds_of(drafts) if choosing is None else blank.kinds(drafts)
        if self.runner.device.type == "cuda":
            self._compile(kinds)
        self._read_blank()
        if choosing is not None:
            table = profile_captured_rounds(blank, self.options.max_drafts)
            choosing.uniform_costs = LiveCosts(
                table, uniform=True, captured_size=self.seating.graphs.bucket
            )
        else:
            self.seating.warm_up(kinds)

    def _compile(self, kinds: Sequence[Kind]) -> None:
        """All kernels of a pass over prompts and of these rounds, side by side."""
        from headstart.backends.cuda.compiling import compiled_together, thinned

        model = thinned(self.seating.graphs.model)
        with compiled_together():
            self._read_blank()
            for kind in kinds:
                run_round(model, self.seating.seats, kind)

    def _read_blank(self) -> None:
        """A short prompt that nobody asked, by trunk and head."""
        size = self.runner.block_size
        count = max(1, min(_WARM_ROWS, self.scheduler.pool.num_slots // 2))
        blank = Request("warm", [0] * count, SamplingParams(temperature=0), 0, 1, frozenset(), 0)
        blank.blocks = list(range(-(-count // size)))
        (states,), _ = self.runner.trunk([Work(blank, 0, count, ())])
        if self.drafter is not None and count > 1:
            rows = HeadRows(blank, 1, blank.tokens[1:], states[:-1])
            self.runner.head_pass(0, [rows])

    def _chosen(self) -> dict[Request, int]:
        """Drafts of everybody who sits."""
        if self.speculation is None or not self.seating.taken:
            return {}
        going = len(self.scheduler.running)
        seated = list(self.seating.taken.values())
        chosen = self.speculation.choose(seated, num_running=going, uniform=True)
        self.stats.draft_reason = self.speculation.reason
        return chosen

    def _decide_heads(self) -> None:
        """Who is admitted now may go without a head; who went without may be better off with."""
        if self._headless is None:
            return
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self._headless.look(running, waiting)
        for request in self._headless.to_start_again(running) if not waiting else []:
            self.seating.give_up(request)
            self.scheduler.restart(request)
            self.stats.heads_regained += 1

    def _time_round(self, flight: Flight | None) -> None:
        """What a round really took, where its result has just been read."""
        if flight is None or flight.timed is None or self.speculation is None:
            return
        kind, context = flight.timed.kind, flight.timed.context
        self.speculation.observe_round(kind.count, kind.num_drafts, context, flight.seconds())

    def _take(self, outcome: Outcome) -> Update | None:
        """Hand out what the device gave one request, unless it has ended since."""
        request, tokens = outcome.request, outcome.tokens
        if request.state is not State.RUNNING or request.seat is None:
            return None
        num_accepted = len(tokens) - 1
        verdict = Verdict(
            tokens, list(origins(num_accepted, outcome.num_drafts)), num_accepted,
            outcome.num_drafts, [],
        )  # fmt: skip
        # The round began with these in trunk and head.
        num_final = len(request.tokens) - outcome.num_unread
        update = self._deliver(request, verdict)
        request.num_computed = len(request.tokens) - 1
        self.scheduler.register(request, min(num_final, request.num_computed))
        return update

    def _decide(self, plan: Sequence[Work], logits: torch.Tensor) -> dict[str, Verdict]:
        """Tokens of those who will sit are chosen on the device, and nobody waits for them."""
        deciding = [work for work in plan if work.needs_logits]
        ready = [w for w in deciding if not w.drafts and self._may_sit(w.request)]
        # As many as fit, the most important first: who does not must not keep the others waiting.
        ready = ready[: self.seating.room()]
        if not ready:
            return super()._decide(plan, logits)
        rows, kept, at = [], [], 0
        for work in deciding:
            own = list(range(at, at + work.num_logits))
            at += work.num_logits
            rows += own if work in ready else []
            kept += [] if work in ready else own
        requests = [work.request for work in ready]
        chosen = self.runner.choose_first(logits[rows] if kept else logits, requests)
        self._chosen_first = dict(zip(requests, chosen.unbind(), strict=True))
        self._firsts = self.seating.send(chosen, requests)
        others = [work for work in plan if work not in ready]
        return super()._decide(others, logits[kept]) if kept else {}

    def _draft(self, decided: list[Request]) -> None:
        """Whose token is on the device sits down; the others draft with the host's help."""
        ready, self._chosen_first = self._chosen_first, {}
        if ready:
            self._seat(ready)
        # Who stood up for want of memory goes on without drafts, and so gets a seat again, if
        # there is one for him; the others draft.
        going = [r for r in decided if r.finish_reason is None]
        next_ones = [r for r in going if self._may_sit(r)][: self.seating.room()]
        super()._draft([r for r in decided if r not in next_ones and not r.is_headless])

    def _may_sit(self, request: Request) -> bool:
        vocab = self._draft_vocab if self.drafter is not None else request.draft_vocab
        return may_sit(request, vocab, self.seating.seats.max_drafts)

    def _seat(self, newest: dict[Request, torch.Tensor]) -> None:
        """The head reads everything before the newest token; the rest is the device's."""
        requests = list(newest)
        states: dict[Request, torch.Tensor] = {}
        if self.drafter is not None:
            with_head = [request for request in requests if not request.is_headless]
            states = {r: r.head.states[0][-1].clone() for r in with_head}
            self.drafter.catch_up(with_head, force=True)
            for request in with_head:
                self._register(request)
        for request in requests:
            request.head = HeadTrack()
            self.seating.sit(request, states.get(request), newest[request])
        self._release_siblings(requests)

    def _close(self, request: Request) -> None:
        if request.seat is not None:
            self.seating.leave(request)
        self.stats.headless += request.is_headless
        super()._close(request)
