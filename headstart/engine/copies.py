"""Drafts that are copied from a request's own context, or from other answers of this engine.

Keeps an index of every running request's text, which grows as prompts are read and tokens come.
A request that starts again after preemption keeps its own: its tokens are the same.
"""

from __future__ import annotations

from headstart.copying.answers import AnswerStore
from headstart.copying.drafts import Copy, copy_after
from headstart.copying.index import TextIndex
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request


class ContextDrafter:
    """The texts of all running requests that may copy."""

    def __init__(self, options: EngineOptions):
        self._is_usual = options.is_automatic
        kept = options.draft_from_answers
        self._answers = AnswerStore(kept) if kept else None
        self._texts: dict[str, TextIndex] = {}
        self._copies: dict[str, Copy] = {}  # what each request could go on with, when last asked

    def takes(self, request: Request) -> bool:
        """Whether a request may copy: if it asks for it, or leaves the choice to the engine."""
        params = request.params
        if params.draft_from != "auto":
            return params.draft_from == "context"
        return self._is_usual and params.speculate in (None, "auto")

    def read(self, request: Request, count: int) -> None:
        """Index the first `count` tokens, while a prompt is read: long ones take a moment."""
        if not self.takes(request):
            return
        text = self._texts.setdefault(request.id, TextIndex())
        text.extend(request.tokens[len(text) : count])

    def find(self, request: Request, count: int) -> Copy | None:
        """What the request would go on with if it copied, up to so many tokens."""
        self._copies.pop(request.id, None)
        if not self.takes(request) or count < 1:
            return None
        self.read(request, len(request.tokens))
        copy = copy_after(
            self._texts[request.id], answers=self._answers, owner=request.cache_root, count=count
        )
        if copy is not None:
            self._copies[request.id] = copy
        return copy

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
