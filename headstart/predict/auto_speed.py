"""What `auto` would bring: its own policy, played over answers whose right drafts are known."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.simulate.answers import GREEDY, NO_LIMIT
from headstart.simulate.cost import Costs
from headstart.simulate.matches import Matches

_NO_LENGTH = 1 << 40


def auto_speed(
    answers: Sequence[Matches], costs: Costs, requests: int, max_drafts: int
) -> float | None:
    """Speed over no drafts, so many requests at a time; None where no answer has a round.

    Rounds take what `costs` say, all requests with the same number of drafts or between two such
    rounds. Seconds do not vary, and of the time that `auto` takes to decide nothing is counted.
    """
    curve = tuple((k, costs.round_seconds(requests, k)) for k in range(max_drafts + 1))
    table = RoundCosts(((requests, curve),))
    policy = DraftPolicy(EngineOptions(speculate="auto"), _NO_LENGTH, table)
    going = [each for each in answers if _Answer(each, 0).is_going]
    if not going:
        return None
    # Fewer answers than requests come several times: the batch is to be full.
    count = max(len(going), requests)
    waiting = [_Answer(going[number % len(going)], number) for number in range(count)]
    tokens, seconds, running = 0, 0.0, list[_Answer]()
    while len(waiting) + len(running) >= requests:
        while waiting and len(running) < requests:
            running.append(waiting.pop(0))
        by_request = {each.request: each for each in running}
        chosen = policy.choose(list(by_request), len(running))
        drafts = {r: min(k, max_drafts) for r, k in chosen.items()}
        mean = sum(drafts.values()) / len(drafts)
        took = table.verify_seconds(requests, round(requests * (1 + mean)))
        seconds += took
        policy.observe_verify(list(by_request), round(len(running) * (1 + mean)), took)
        for request, each in by_request.items():
            tokens += each.advance(drafts[request], policy)
        for each in [each for each in running if not each.is_going]:
            running.remove(each)
            policy.forget(each.request)
    return tokens / seconds * costs.round_seconds(requests, 0) / requests


class _Answer:
    """An answer on its way: the newest token is a_`newest`."""

    def __init__(self, matches: Matches, number: int):
        self._leading: list[int] = matches.num_leading.tolist()
        self._length = matches.answer.num_tokens
        self.newest = 0
        limit = matches.answer.limit if matches.answer.limit != NO_LIMIT else _NO_LENGTH
        start = matches.answer.start
        self.request = Request(str(number), [0] * start, GREEDY, 0, limit, frozenset(), number)
        self.request.tokens.append(0)

    @property
    def is_going(self) -> bool:
        return self.newest < self._length - 1

    def advance(self, drafts: int, policy: DraftPolicy) -> int:
        """One round; the tokens that it gave."""
        accepted = min(self._leading[self.newest], drafts)
        policy.observe(self.request, drafts, accepted)
        new = min(accepted + 1, self._length - 1 - self.newest)
        self.newest += new
        self.request.tokens += [0] * new
        return new
