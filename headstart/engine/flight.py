"""A round on the device that the host has launched, and what it gives each request in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from headstart.backends.base import Emitted, Launched
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.request import Request


@dataclass(frozen=True)
class RoundOutcome:
    """What one round gave one request."""

    request: Request
    emitted: Emitted
    num_drafts: int
    num_unread: int = 0  # tokens from before the round that the head has not read yet, at most
    num_of_head: int | None = None  # drafts from here on were copied; None: none were


@dataclass(frozen=True)
class MeasuredRound:
    """What a whole round cost."""

    size: int
    num_drafts: int
    context: int
    seconds: float


@dataclass(frozen=True)
class Flight:
    """A round that was launched: its requests by index, as they were then."""

    requests: list[Request]
    launched: Launched
    context: int  # tokens of all requests together
    fitting: dict[int, int] = field(default_factory=dict)  # drafts that a grammar lets through

    def outcomes(self) -> list[RoundOutcome]:
        """What it gave, when the device is done with it: the host waits."""
        emitted = self.launched.collect()
        return [
            RoundOutcome(
                request, emitted[index], self._num_drafts(index, emitted[index]),
                self.launched.num_unread, emitted[index].num_of_head,
            )
            for index, request in enumerate(self.requests)
            if emitted[index].tokens
        ]  # fmt: skip

    def grammars(self) -> dict[int, GuardedGrammar]:
        """Those of requests that go on, by index."""
        return {
            index: request.grammar
            for index, request in enumerate(self.requests)
            if request.grammar is not None and request.finish_reason is None
        }

    def mask_size(self) -> tuple[int, int]:
        """Rows of requests with grammars, and words of their masks."""
        pairs = zip(self.requests, self.launched.drafts, strict=True)
        held = [(r.grammar.num_words, 1 + drafts) for r, drafts in pairs if r.grammar is not None]
        return sum(rows for _, rows in held), max((words for words, _ in held), default=0)

    def measured(self) -> MeasuredRound | None:
        """What it cost, where that counts; after `outcomes`."""
        timing = self.launched.timing()
        if timing is None:
            return None
        return MeasuredRound(timing.size, timing.num_drafts, self.context, timing.seconds)

    def _num_drafts(self, index: int, emitted: Emitted) -> int:
        """Drafts that counted: as many as there was room for, and as a grammar let through."""
        made = emitted.num_drafts
        made = self.launched.drafts[index] if made is None else made
        most = min(made, self.requests[index].room - 1)
        return max(0, min(most, self.fitting.get(index, most)))
