"""The embedded engine: add requests, step, collect; what a step does is in `loop.py`.

Every step advances all requests: a stream, `generate` and `step` may be used side by side, and
each gets what belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Unpack

from headstart.backends.base import PreparedHead
from headstart.data.prompt_reader import Prompt, TemplateOptions
from headstart.engine.admission import Admission, Asked
from headstart.engine.core import EngineCore
from headstart.engine.draft_vocabs import Source
from headstart.engine.grammar import Grammar
from headstart.engine.groups import Groups
from headstart.engine.kept_states import KeptStates
from headstart.engine.opening import open_model
from headstart.engine.options import EngineOptions, EngineSettings, engine_options
from headstart.engine.output import Result, Update
from headstart.errors import EngineError, RequestError
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab

_WARM_TOKENS = 12  # of the request that a start makes, and more than it needs


class Engine:
    """A model with its head on one device."""

    def __init__(
        self,
        model: str | Path,
        head: str | Path | None = None,
        *,
        options: EngineOptions | None = None,
        draft_vocab: Source | None = None,
        promised_bytes: int = 0,
        **settings: Unpack[EngineSettings],
    ):
        """promised_bytes: of memory that is free, and that another process will take."""
        asked = engine_options(options, settings)
        opened = open_model(model, head, draft_vocab, asked)
        self.backend, self.model = opened.backend, opened.backend.model
        self.prompts, self.draft_vocabs = opened.prompts, opened.draft_vocabs
        self._own_rules = opened.own_rules
        core = EngineCore.create(
            self.backend, asked.resolved(self.model.device.type), self.draft_vocabs.by_name,
            promised_bytes=promised_bytes,
        )  # fmt: skip
        self.options = core.options  # with all that was open decided
        self.memory, self.loop, self.policy = core.memory, core.loop, core.policy
        self.scheduler, self.pool = core.scheduler, core.scheduler.pool
        self.admission = Admission(
            self.model, self.prompts, self.options, num_slots=self.pool.num_slots
        )
        self.prompts.most_tokens = self.admission.longest
        self.stats = self.loop.stats
        self.notes = [  # what was decided at start, for people
            *self.model.notes,
            f"backend {self.backend.name}: {self.model.dtype} on {self.model.device}",
            *self.backend.notes,
            *self.draft_vocabs.notes,
            *self.memory.notes,
        ]
        self.head_version = 0  # how often the head was swapped
        self._groups = Groups()
        self._arrivals = 0

    def step(self) -> list[Update]:
        """Advance every running request by one verified chunk; what is new, streams' aside."""
        self._advance()
        return self._groups.take()

    def _advance(self) -> None:
        self._groups.put(self.loop.step())

    def warm_up(self) -> None:
        """A short request of the engine's own, not counted: the first one finds all loaded."""
        if self.admission.longest > _WARM_TOKENS:
            params = SamplingParams(temperature=0, max_tokens=_WARM_TOKENS // 2, ignore_eos=True)
            self.generate([[0, 0]], params)
        self.clear_stats()

    def clear_stats(self) -> None:
        """Forget what was counted and learnt so far."""
        self.stats.clear()
        if self.policy is not None:
            self.policy.reset()

    def prepare_head(
        self, folder: str | Path, draft_vocab: DraftVocab | None = None
    ) -> PreparedHead:
        """Load another head beside the running one and check that it fits; safe in any thread.

        draft_vocab: what is to take the place of the draft vocabulary with it.
        """
        vocabs = {} if draft_vocab is None else self.draft_vocabs.replacing(draft_vocab)
        return self.backend.prepare_head(Path(folder), vocabs)

    def swap_head(self, head: str | Path | PreparedHead) -> None:
        """Draft with another head from the next step on; between two steps, requests go on.

        A head that does not fit is refused, and nothing is changed. What the old head left in K/V
        stays: it may cost acceptance, never text.
        """
        prepared = head if isinstance(head, PreparedHead) else self.prepare_head(head)
        self.backend.swap_head(prepared)
        self.draft_vocabs.replaced({name: ids.tolist() for name, ids in prepared.ids.items()})
        self.head_version += 1
        if self.policy is not None:
            self.policy.reset()  # what it has learnt is about the old head

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
        chat_template_kwargs: TemplateOptions | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Submit a prompt (text, token ids or chat messages); returns its id.

        The smaller its priority, the more important a request is. A prefix cache is shared by
        requests of the same cache_salt, or by those without one.
        """
        asked = self.read(prompt, params, chat_template_kwargs)
        return self.submit(
            asked, request_id=request_id, priority=priority, grammar=grammar, cache_salt=cache_salt
        )

    def read(
        self, prompt: Prompt, params: SamplingParams | None = None,
        chat_template_kwargs: TemplateOptions | None = None,
    ) -> Asked:  # fmt: skip
        """Check what is asked, before anything is queued; safe in any thread."""
        params = params or self.prompts.default_params()
        ids = self.prompts.read(prompt, chat_template_kwargs)
        self.admission.check(ids, params)
        vocab = None
        if self.draft_vocabs.by_name or params.draft_vocab is not None:
            vocab = self.draft_vocabs.choose(params.draft_vocab, prompt, ids, self.prompts)
        return Asked(ids, params, vocab, None if vocab is None else self._own_rules.get(vocab))

    def submit(
        self, asked: Asked, *, request_id: str | None = None, priority: int = 0,
        grammar: Grammar | None = None, cache_salt: str | None = None, is_claimed: bool = False,
        keeps_states: bool = False,
    ) -> str:  # fmt: skip
        """Queue what `read` gave; returns its id.

        keeps_states: hand out the trunk's states with the result, where the host sees them.
        """
        group = request_id or self._free_id()
        if group in self._groups:
            raise RequestError(f"request id {group!r} is in use; choose another one.")
        requests = self.admission.requests(
            group, asked, arrival=self._arrivals, priority=priority, grammar=grammar,
            cache_salt=cache_salt,
        )  # fmt: skip
        if keeps_states and (kind := self.loop.state_kind) is not None:
            for request in requests:
                request.kept_states = KeptStates(kind)
        self._arrivals += len(requests)
        self._groups.open(group, requests, is_claimed=is_claimed)
        self.scheduler.add(requests[0], requests[1:])
        return group

    def _free_id(self) -> str:
        names = (f"request-{number}" for number in count(self._arrivals))
        return next(name for name in names if name not in self._groups)

    def abort(self, request_id: str) -> None:
        """End a request now; its memory is free at once. Unknown ids are ignored.

        What it had can still be collected; of those that are not, the oldest are forgotten.
        """
        requests = self._groups.unfinished(request_id)
        for request in requests:
            self.loop.abort(request)
        if requests:
            self._groups.abandon(request_id)

    def cut(self, request_id: str, reason: str) -> None:
        """End a request now with what it has, as if that were its `max_tokens`.

        The next step hands out its last update, whose `stop_reason` is the given one.
        """
        requests = self._groups.unfinished(request_id)
        self._groups.put([self.loop.cut(request, reason) for request in requests])

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, or to hand out."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._groups.has_updates)

    def collect(self, request_id: str) -> Result:
        """The result of a finished request; it is forgotten here."""
        return self._groups.collect(request_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
        chat_template_kwargs: TemplateOptions | None = None,
        cache_salt: str | None = None,
    ) -> list[Result]:
        """Answer prompts, one result each, in order; all of them or none."""
        many = self.prompts.as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise RequestError(
                f"{len(many)} prompts came with {len(each)} sampling parameters; "
                "give one set for all, or one for each prompt."
            )
        asked = [
            self.read(prompt, own, chat_template_kwargs)
            for prompt, own in zip(many, each, strict=True)
        ]
        ids: list[str] = []
        try:
            for one in asked:
                name = self.submit(
                    one, request_id=request_id, priority=priority, grammar=grammar,
                    cache_salt=cache_salt, is_claimed=True,
                )  # fmt: skip
                ids.append(name)
            self._groups.discard_updates(ids)
            while not all(map(self._groups.is_finished, ids)):
                self._advance()
            return [self.collect(name) for name in ids]
        finally:
            for name in ids:
                self._drop(name)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
        chat_template_kwargs: TemplateOptions | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[Update]:
        """Answer one prompt, yielding what each step adds; other requests advance as well."""
        asked = self.read(prompt, params, chat_template_kwargs)
        name = self.submit(
            asked, request_id=request_id, priority=priority, grammar=grammar,
            cache_salt=cache_salt, is_claimed=True,
        )  # fmt: skip
        group = self._groups.find(name)
        assert group is not None
        try:
            is_finished = False
            while not is_finished:
                if not group.updates:  # no other caller has stepped
                    self._advance()
                is_finished = group.is_finished
                yield from group.take()
        finally:
            if self._groups.find(name) is group:  # an aborted id may be another request's now
                self._drop(name)

    def recover(self) -> None:
        """After a step that raised: end every request. Raises if memory is not free then."""
        for request_id in self._groups.names:
            self._drop(request_id)
        self.scheduler.check()
        if left := self.pool.num_used:
            raise EngineError(
                f"{left} K/V blocks belong to no request after a failed step. Restart."
            )

    def _drop(self, request_id: str) -> None:
        self.abort(request_id)
        self._groups.forget(request_id)
