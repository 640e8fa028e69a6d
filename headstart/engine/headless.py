"""Who is answered without a head: where drafts do not pay, one reads prompts for nothing.

Only with `auto`, and only requests that sit on the device. A few keep their head, so that what
drafts are worth stays known. When drafting pays again, because others have left or because drafts
are right more often, headless requests start again with a head, if what they still have to say is
worth reading them once more: they keep their tokens, as after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable

from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.engine.speculation import Speculation

# Of the speed without heads: drafts that promise less do not pay, drafts that promise more do.
# Between the two nothing changes: few heads tell inexactly what drafts are worth, and a batch that
# is half with heads and half without has the worst of both.
_TOO_LITTLE, _ENOUGH = 0.99, 1.03
_KEPT = 8  # one request of so many keeps its head
_WORTH = 2.0  # times what it costs, a second start must save
_CHECK_EVERY = 16  # steps between two looks at that


class Headless:
    """Decides for one engine, by what `Speculation` knows."""

    def __init__(
        self, options: EngineOptions, speculation: Speculation, may_sit: Callable[[Request], bool]
    ):
        self._options, self._speculation, self._may_sit = options, speculation, may_sit
        self._is_dear = False  # whether heads cost more than they give, to all who wait
        self._steps = 0

    def look(self, running: list[Request], waiting: list[Request]) -> None:
        """Before requests are admitted: what will drafts be worth when all who wait are in?"""
        if not waiting:
            return
        known = [*running, *waiting][: self._options.max_running_requests]
        prospect = self._speculation.prospect(len(known), _context(known))
        limit = _ENOUGH if self._is_dear else _TOO_LITTLE
        self._is_dear = prospect is not None and prospect < limit

    def goes_without(self, request: Request) -> bool:
        """Whether a request is admitted without a head."""
        first_of_group = request.arrival - request.sample  # samples of one prompt share blocks
        return (
            self._is_dear
            and self._speculation.is_automatic(request)
            and not request.was_headless
            and first_of_group % _KEPT != 0
            and self._may_sit(request)
        )

    def to_start_again(self, running: list[Request]) -> list[Request]:
        """Seated headless requests that are better off with a head; looks now and then."""
        self._steps += 1
        spared = [
            request for request in running if request.is_headless and request.seat is not None
        ]
        if self._steps % _CHECK_EVERY or not spared:
            return []
        rounds, context = self._speculation.rounds, _context(running)
        prospect = self._speculation.prospect(len(running), context)
        if rounds is None or prospect is None or prospect < _ENOUGH:
            return []
        # Nobody knows where an answer ends: taken to be half of it what has come so far.
        left = sum(min(r.room, r.num_output) for r in spared) / len(spared)
        plain_seconds = rounds.headless_seconds(len(running), context)
        saved = left * plain_seconds * (1 - 1 / prospect)
        cost = sum(len(r.tokens) for r in spared) * rounds.row_seconds
        return spared if saved > _WORTH * cost else []


def _context(requests: list[Request]) -> int:
    return sum(len(request.tokens) for request in requests)
