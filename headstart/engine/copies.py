"""Drafts that are copied from a request's own context, or from other answers of this engine.

Keeps an index of every running request's text, which grows as prompts are read and tokens come.
A request that starts again after preemption keeps its own: its tokens are the same. What indices
take is bounded: a step adds what it read and a few tokens more, and where texts are very long, or
many are long, their beginnings are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headstart.copying.answers import AnswerStore
from headstart.copying.drafts import MAX_COPIED, Copy, copy_after
from headstart.copying.index import TextIndex
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

INDEXED_AT_ONCE = 4096  # tokens of all texts: some ms, where prefix hits bring many more
MOST_INDEXED = 1 << 18  # tokens of a prompt, its last ones, and the answer behind them
ALL_INDEXED = 1 << 22  # of all texts that are kept: 0.6 GB at 150 bytes each
LEAST_INDEXED = 4096  # of a prompt, where the others have all of these
_NEW = MAX_COPIED + 1  # tokens that a round gives a request at most


@dataclass(slots=True)
class _Text:
    """What is indexed of a request's text, from token `begin` on."""

    begin: int
    planned: int  # tokens of the prompt that are to be
    params: SamplingParams  # with which the request may copy
    index: TextIndex = field(default_factory=TextIndex)

    @property
    def end(self) -> int:
        return self.begin + len(self.index)

    @property
    def size(self) -> int:
        return max(self.planned, len(self.index))


class ContextDrafter:
    """The texts of all running requests that may copy."""

    def __init__(self, options: EngineOptions):
        self._speculate = options.speculate
        self._runs_head, self._is_automatic = options.runs_head, options.is_automatic
        kept = options.draft_from_answers
        self._answers = AnswerStore(kept) if kept else None
        self._texts: dict[str, _Text] = {}
        self._copies: dict[str, Copy] = {}  # what each request could go on with, when last asked

    def takes(self, request: Request) -> bool:
        """Whether a request may copy: if it asks for it, or leaves the choice to the engine.

        Where no head runs, a number of drafts can only be one of copied ones.
        """
        params = request.params
        asked = self._speculate if params.speculate is None else params.speculate
        if asked == 0 or request.max_tokens < 2 or params.draft_from == "head":
            return False
        if params.draft_from == "context":
            return True
        return not self._runs_head if isinstance(asked, int) else self._is_automatic

    def read(self, request: Request, count: int) -> None:
        """Index `count` tokens more: as many as a step read of a prompt."""
        text = self._text(request)
        if text is not None:
            text.index.extend(request.tokens[text.end : text.end + count])

    def _text(self, request: Request) -> _Text | None:
        """None: it may not copy."""
        text, params = self._texts.get(request.id), request.params
        if text is not None and text.params is params:
            return text
        if not self.takes(request):
            return None
        if text is None:
            left = ALL_INDEXED - sum(other.size for other in self._texts.values())
            planned = min(len(request.tokens), MOST_INDEXED, max(left, LEAST_INDEXED))
            text = _Text(len(request.tokens) - planned, planned, params)
            self._texts[request.id] = text
        text.params = params
        return text

    def find(self, request: Request, count: int) -> Copy | None:
        """What the request would go on with if it copied, up to so many tokens."""
        return self.find_all([request], lambda _: count).get(request)

    def find_all(
        self, requests: Iterable[Request], count: Callable[[Request], int]
    ) -> dict[Request, Copy]:
        """What these would go on with if they copied, up to `count` tokens of each.

        Nothing as long as a text is not indexed to the end: behind prefix hits one after another.
        Most requests can copy nothing in most rounds, so little is done for them.
        """
        answers, found, left = self._answers, dict[Request, Copy](), INDEXED_AT_ONCE
        for request in requests:
            self._copies.pop(request.id, None)
            if (text := self._text(request)) is None:
                continue
            index, tokens = text.index, request.tokens
            done = text.end
            if done < len(tokens):
                more = max(left, _NEW)
                index.extend(tokens[done : done + more])
                left -= min(more, len(tokens) - done)
                if done + more < len(tokens):
                    continue
            if (answers is None and index.match() is None) or (most := count(request)) < 1:
                continue
            copy = copy_after(index, answers=answers, owner=request.cache_root, count=most)
            if copy is not None:
                self._copies[request.id] = found[request] = copy
        return found

    def found(self, request: Request) -> Copy | None:
        """What was found last."""
        return self._copies.get(request.id)

    def take(self, request: Request) -> Copy | None:
        """What was found last, once: tokens that came since show whether it was right."""
        return self._copies.pop(request.id, None)

    def forget(self, request: Request) -> None:
        """The request has ended; its answer may be of use to others."""
        if self._answers is not None and request.finish_reason in ("stop", "length"):
            self._answers.add(request.cache_root, request.output_ids)
        self._texts.pop(request.id, None)
        self._copies.pop(request.id, None)
