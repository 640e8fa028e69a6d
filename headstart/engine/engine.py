"""The embedded engine: add requests, step, collect. THE main flow is `step`.

One step advances every running request by one verified chunk: rows of prompt, or the newest
token and its drafts. What is emitted is the trunk's own choice, always; drafts only decide how
many tokens a step gives.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from headstart.assembly.build import Built, build
from headstart.checkpoint.hub import local_folder
from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import Prompt, PromptReader
from headstart.engine.admission import Admission
from headstart.engine.cost import measure
from headstart.engine.drafter import Drafter
from headstart.engine.kv_cache import BlockPool
from headstart.engine.memory import num_blocks
from headstart.engine.options import EngineOptions
from headstart.engine.outputs import Completion, Result, Update
from headstart.engine.request import Request, State
from headstart.engine.runner import Runner
from headstart.engine.scheduler import Scheduler, Work
from headstart.engine.speculation import Speculation
from headstart.engine.stats import EngineStats
from headstart.engine.verifier import Verdict, verify
from headstart.errors import RequestError
from headstart.sampling.params import SamplingParams


class Engine:
    """A model with its head on one device."""

    def __init__(
        self,
        model: str | Path,
        head: str | Path | None = None,
        *,
        options: EngineOptions | None = None,
        draft_vocab: Sequence[int] | None = None,
        **settings: Any,
    ):
        self.options = options or EngineOptions(**settings)
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        checkpoint = Checkpoint.open(local_folder(model))
        self.built: Built = build(
            checkpoint, Path(head) if head is not None else None,
            device=self.options.device, dtype=self.options.dtype, weights=self.options.weights,
            max_model_len=self.options.max_model_len, layout=self.options.layout,
            with_head=self.options.speculate != 0,
        )  # fmt: skip
        blocks, self.block_bytes = num_blocks(self.built, self.options)
        self.pool = BlockPool(
            blocks, self.options.block_size, prefix_caching=self.options.prefix_caching
        )
        self.scheduler = Scheduler(self.pool, self.options)
        self.runner = Runner(
            self.built.trunk, self.built.head, num_blocks=blocks,
            block_size=self.options.block_size, dtype=self.built.dtype,
        )  # fmt: skip
        if draft_vocab is not None:
            self.runner.add_draft_vocab("default", draft_vocab)
        self.drafter = Drafter(self.runner) if self.built.head is not None else None
        self.prompts = PromptReader(checkpoint)
        self.admission = Admission(
            self.built, self.prompts, self.options, num_slots=self.pool.num_slots
        )
        self.speculation = self._speculation(blocks)
        self.stats = EngineStats()
        self._groups: dict[str, list[Request]] = {}
        self._arrivals = 0

    def _speculation(self, blocks: int) -> Speculation | None:
        if self.drafter is None:
            return None
        costs = None
        if self.options.speculate == "auto":
            # Before the first request, while K/V memory is still scratch.
            with torch.inference_mode():
                costs = measure(self.runner, self.options.max_batched_tokens, blocks)
        return Speculation(self.options, costs, self.built.max_len)

    @property
    def notes(self) -> list[str]:
        """What was decided at start, for people."""
        size = self.pool.num_blocks * self.block_bytes
        return [
            *self.built.notes,
            f"{self.pool.num_blocks} K/V blocks of {self.options.block_size} tokens "
            f"({size / 1e6:.0f} MB), {self.built.dtype} on {self.built.device}",
        ]

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Advance every running request by one verified chunk."""
        plan = self.scheduler.plan()  # who runs, how many rows each, which blocks
        if not plan:
            return []
        self._resume_hits(plan)
        started = time.perf_counter()
        states, logits = self.runner.trunk(plan)  # one pass over prompts, newest tokens and drafts
        verdicts = verify(plan, logits)  # accepted drafts, then a recovered or bonus token
        self.stats.trunk_seconds += time.perf_counter() - started
        updates = [
            update
            for work, rows in zip(plan, states, strict=True)
            if (update := self._commit(work, rows, verdicts.get(work.request.id))) is not None
        ]
        self._draft([work.request for work in plan if work.request.id in verdicts])
        self._retire()
        self.stats.steps += 1
        return updates

    def _resume_hits(self, plan: Sequence[Work]) -> None:
        """Requests that begin after a prefix hit take up the head where the hit ends."""
        for work in plan:
            request = work.request
            if request.num_cached and request.num_cached == work.start and not request.head.done:
                request.stats.num_cached_tokens += request.num_cached
                self.stats.cached_tokens += request.num_cached
                if self.drafter is not None:
                    self.drafter.resume(request)

    def _commit(self, work: Work, rows: torch.Tensor, verdict: Verdict | None) -> Update | None:
        """Take over what a step decided for one request."""
        request = work.request
        valid = (
            work.count if verdict is None else work.count - len(work.drafts) + verdict.num_accepted
        )
        request.num_computed = work.start + valid
        if self.drafter is not None:
            self.drafter.feed(request, work.start, rows[:valid])
        self.stats.prompt_tokens += max(0, min(work.stop, request.num_prompt) - work.start)
        if verdict is None:
            self._register(request)
            return None
        request.drafts = []
        before = request.num_output
        self._emit(request, verdict)
        if before:
            # Drafts behind a stop were right for nothing: they do not count as accepted.
            self._observe(
                request, verdict.num_drafts, min(verdict.num_accepted, request.num_output - before)
            )
        elif request.stats.first_token_seconds is None:
            request.stats.first_token_seconds = time.perf_counter() - request.created
        self._register(request)
        is_last = request.finish_reason is not None
        text = request.text.take(is_last=is_last) if request.text is not None else ""
        return Update(
            request.group, request.sample, request.output_ids[before:], text,
            request.origins[before:], request.logprobs[before:], request.finish_reason,
        )  # fmt: skip

    def _observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        request.stats.acceptance.observe(num_drafts, num_accepted)
        self.stats.acceptance.observe(num_drafts, num_accepted)
        chosen = self.stats.chosen_drafts
        chosen[num_drafts] = chosen.get(num_drafts, 0) + 1
        if self.speculation is not None:
            self.speculation.observe(request, num_drafts, num_accepted)

    def _emit(self, request: Request, verdict: Verdict) -> None:
        """Append tokens one by one; whatever lies behind a stop is neither emitted nor kept."""
        for index, token in enumerate(verdict.tokens):
            if token < 0:  # nothing was allowed: the grammar has ended
                request.finish_reason = "stop"
                if request.text is not None:
                    request.text.finish()
                return
            request.tokens.append(token)
            request.origins.append(verdict.origins[index])
            if verdict.logprobs:
                request.logprobs.append(verdict.logprobs[index])
            self.stats.output_tokens += 1
            if request.grammar is not None:
                request.grammar.accept(token)
            self._check_end(request, token)
            if request.finish_reason is not None:
                return

    def _check_end(self, request: Request, token: int) -> None:
        params = request.params
        is_end = token in request.end_ids and request.num_output > params.min_tokens
        stopped = None
        if request.text is not None and not is_end:
            stopped = request.text.add(token)
        if is_end or stopped is not None:
            request.finish_reason = "stop"
            request.stop_reason = stopped if stopped is not None else token
        elif request.room <= 0:
            request.finish_reason = "length"
        if request.finish_reason is not None and request.text is not None and stopped is None:
            request.text.finish()

    def _draft(self, decided: list[Request]) -> None:
        """Let the head catch up with the trunk, and guess for those who got a token and go on."""
        if self.drafter is None or self.speculation is None:
            return
        started = time.perf_counter()
        going = [r for r in self.scheduler.running if r.finish_reason is None]
        chosen = self.speculation.choose([r for r in decided if r.finish_reason is None])
        drafting = {
            request: drafts
            for request, wanted in chosen.items()
            if wanted and (drafts := self.scheduler.look_ahead(request, wanted))
        }
        self.drafter.propose(drafting)
        self.drafter.catch_up([r for r in going if r not in drafting])
        self.stats.draft_reason = self.speculation.reason
        self.stats.draft_seconds += time.perf_counter() - started

    def _register(self, request: Request) -> None:
        """Blocks whose trunk and head entries are final may serve others."""
        final = request.num_computed
        if self.drafter is not None:
            final = min(final, self.drafter.num_final(request))
        self.scheduler.register(request, final)

    def _retire(self) -> None:
        for request in [r for r in self.scheduler.running if r.finish_reason is not None]:
            if self.drafter is not None and self.options.prefix_caching:
                self.drafter.catch_up([request], force=True)
                self._register(request)
            self._close(request)
            self.stats.finished += 1
        self.stats.preemptions = self.scheduler.num_preemptions

    def _close(self, request: Request) -> None:
        request.stats.total_seconds = time.perf_counter() - request.created
        self.scheduler.remove(request)
        if self.speculation is not None:
            self.speculation.forget(request)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        grammar: Any = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Submit a prompt (text, token ids or chat messages); returns its id."""
        params = params or self.prompts.default_params()
        ids = self.prompts.read(prompt, chat_template_kwargs)
        self.admission.check(ids, params, self.runner.draft_vocabs)
        group = request_id or self._free_id()
        if group in self._groups:
            raise RequestError(f"request id {group!r} is in use; choose another one.")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        requests = [
            self.admission.request(
                group, sample, ids, params, seed=seed, priority=priority, grammar=grammar,
                arrival=self._arrivals + sample,
            )
            for sample in range(params.n)
        ]  # fmt: skip
        self._arrivals += params.n
        self._groups[group] = requests
        for request in requests:
            self.scheduler.add(request)
        return group

    def _free_id(self) -> str:
        names = (f"request-{number}" for number in count(self._arrivals))
        return next(name for name in names if name not in self._groups)

    def abort(self, request_id: str) -> None:
        """End a request now; its memory is free at once. Unknown ids are ignored."""
        for request in self._groups.get(request_id, []):
            if request.state is not State.FINISHED:
                request.finish_reason = "abort"
                self._close(request)
                self.stats.aborted += 1

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def collect(self, request_id: str) -> Result:
        """The result of a finished request; it is forgotten here."""
        requests = self._groups.pop(request_id)
        return Result(request_id, requests[0].prompt_ids, [_completion(r) for r in requests])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Result]:
        """Answer prompts; one result each, in order."""
        many = self.prompts.as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        ids = [self.add(p, s, **options) for p, s in zip(many, each, strict=True)]
        while self.has_work:
            self.step()
        return [self.collect(request_id) for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Update]:
        """Answer one prompt, yielding what each step adds."""
        request_id = self.add(prompt, params, **options)
        try:
            while any(r.finish_reason is None for r in self._groups[request_id]):
                yield from (u for u in self.step() if u.request_id == request_id)
        finally:
            self.abort(request_id)
            self._groups.pop(request_id, None)


def _completion(request: Request) -> Completion:
    return Completion(
        index=request.sample,
        token_ids=request.output_ids,
        text=request.text.text if request.text is not None else "",
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        origins=request.origins,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        stats=request.stats,
    )
