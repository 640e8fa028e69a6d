"""What `auto` would bring: its own policy, played over answers whose right drafts are known.

Copies are found in the texts themselves, by the code that serves. All answers are played by one
policy, in their order: what it learns of one category it knows in the next, as an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headstart.copying.drafts import Copy
from headstart.engine.auto.copies import PlannedRound
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.live_costs import active_at
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.copies import ContextDrafter
from headstart.engine.options import MAX_DRAFTS, EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams
from headstart.simulate.answers import GREEDY, NO_LIMIT
from headstart.simulate.cost import Costs
from headstart.simulate.matches import Matches

_NO_LENGTH = 1 << 40

Place = tuple[str, int]  # of an answer: its record, and where it begins there


class RoundParts(NamedTuple):
    """Seconds of a round, the head's steps left out."""

    whole: float
    verify: float  # of these the trunk's pass, and what was chosen of it,
    besides: float  # and what is no pass of trunk or head


@dataclass
class _Share:
    """What one answer had of the rounds that were played."""

    rounds: int = 0
    tokens: int = 0
    copied: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0  # that its tokens would take without drafts


@dataclass(frozen=True)
class Speed:
    """Speed over no drafts, and tokens that were copied."""

    speed_up: float
    copied_share: float  # of all tokens


@dataclass(frozen=True)
class Played:
    """What playing answers came to, each by itself."""

    shares: Mapping[Place, _Share]

    def of(self, answers: Sequence[Matches]) -> Speed | None:
        """These of the answers together; None where none of them has a round."""
        places = {_place(each) for each in answers}
        own = [share for place, share in self.shares.items() if place in places]
        tokens, seconds = sum(each.tokens for each in own), sum(each.seconds for each in own)
        if not tokens:
            return None
        plain, copied = sum(each.plain_seconds for each in own), sum(each.copied for each in own)
        return Speed(plain / seconds, copied / tokens)


def _place(matches: Matches) -> Place:
    return matches.answer.record_id, matches.answer.start


def head_speed(answers: Sequence[Matches], costs: Costs, requests: int, max_drafts: int) -> Played:
    """The head alone, so many requests at a time.

    Rounds take what `costs` say, all requests with the same number of drafts or between two such
    rounds. Seconds do not vary.
    """
    curve = tuple((k, costs.round_seconds(requests, k)) for k in range(max_drafts + 1))
    table = RoundCosts(((requests, curve),))
    return Play(EngineOptions(speculate="auto"), table, requests, max_drafts).run(answers)


class Play:
    """A batch of answers that is kept full, round by round; the host drives rounds."""

    def __init__(
        self, options: EngineOptions, table: RoundCosts, requests: int, max_drafts: int,
        texts: Mapping[str, list[int]] | None = None, params: SamplingParams = GREEDY,
        known: RoundCosts | None = None,
    ):  # fmt: skip
        """`table`: what rounds take; `known`: what the policy begins with, where that differs."""
        self._policy, self._table = DraftPolicy(options, _NO_LENGTH, known or table), table
        self._requests, self._max_drafts, self._texts = requests, max_drafts, texts
        self._params = params
        self._copies = ContextDrafter(options) if texts is not None else None

    def run(self, answers: Sequence[Matches]) -> Played:
        requests = self._requests
        going = [each for each in answers if each.answer.num_tokens > 1]
        shares = {_place(each): _Share() for each in going}
        # Fewer answers than requests come several times: the batch is to be full.
        waiting = [
            RunningAnswer(each, number, self._texts, shares[_place(each)], self._params)
            for number in range(max(len(going), requests) if going else 0)
            for each in [going[number % len(going)]]
        ]
        running = list[RunningAnswer]()
        while len(waiting) + len(running) >= requests:
            while waiting and len(running) < requests:
                running.append(waiting.pop(0))
                self._read(running[-1].request)
            context = sum(len(each.request.tokens) for each in running)
            plain, before = self._plain_seconds(context), [each.newest for each in running]
            took = self._round(running)
            for each, newest in zip(running, before, strict=True):
                each.share.seconds += took
                each.share.plain_seconds += plain * (each.newest - newest)
                each.share.rounds += 1
            for each in [each for each in running if not each.is_going]:
                running.remove(each)
                self._end(each)
        return Played(shares)

    def _plain_seconds(self, context: int) -> float:
        """A round without drafts, of requests with so many tokens together."""
        return self._table.round_seconds(self._requests, 0)

    def _parts(self, size: int, rows: int, context: int, *, could_copy: bool) -> RoundParts:
        """What a round of so many requests and rows takes, the head's steps left out."""
        seconds = self._table.verify_seconds(size, rows)
        return RoundParts(seconds, seconds, 0.0)

    def _drafting(self, drafting: Mapping[Request, int]) -> float:
        """What the head's steps take, of requests with so many drafts each."""
        active = active_at(list(drafting.values()))
        steps = sum(map(self._table.draft_seconds, active))
        return self._table.start_seconds(len(drafting)) + steps

    def _end(self, answer: RunningAnswer) -> None:
        answer.request.finish_reason = "length"  # whole: others may copy from it
        self._policy.forget(answer.request)
        if self._copies is not None:
            self._copies.forget(answer.request)

    def _round(self, running: Sequence[RunningAnswer]) -> float:
        """Seconds of one round; all requests that run in it wait for its end."""
        requests = {each.request: each for each in running}
        copies = self._find(requests)
        planned = self._policy.plan(list(requests), len(running), copies)
        drafting = {r: min(k, self._max_drafts) for r, k in planned.head.items() if k}
        size, context = len(running), sum(len(request.tokens) for request in requests)
        rows = size
        for request, each in requests.items():
            of_head, copy = drafting.get(request, 0), copies.get(request)
            drafts = _drafts(each, of_head, copy, planned, self._policy.more_copied)
            rows += drafts
            each.advance(of_head, drafts, copy, self._policy)
        parts = self._parts(size, rows, context, could_copy=bool(copies))
        took = self._drafting(drafting)
        self._policy.observe_verify(list(requests), rows, parts.verify)
        if took:  # nothing where drafts count as a part of the verification
            self._policy.observe_drafts(drafting, took)
        self._policy.observe_overhead(parts.besides)
        return parts.whole + took

    def _read(self, request: Request) -> None:
        """Index a prompt, as an engine does while it reads it."""
        if self._copies is not None:
            self._copies.read(request, len(request.tokens))

    def _find(self, requests: Mapping[Request, RunningAnswer]) -> dict[Request, Copy]:
        if self._copies is None:
            return {}
        return self._copies.find_all(
            requests, lambda request: min(MAX_DRAFTS, self._policy.room(request))
        )


def _drafts(
    answer: RunningAnswer, of_head: int, copy: Copy | None, planned: PlannedRound,
    more: Callable[[Request, Copy, PlannedRound], int],
) -> int:  # fmt: skip
    """Drafts of one request: the head's, and those that are copied instead or after them."""
    request = answer.request
    if copy is None:
        return of_head
    if not of_head:
        return planned.copied.get(request, 0)
    # Drafts that are right agree; that both are wrong in the same way is not known.
    if min(answer.leading, len(copy.tokens), copy.num_right(answer.following)) < of_head:
        return of_head
    request.drafts = copy.tokens[:of_head]
    found = of_head + more(request, copy, planned)
    request.drafts = []
    return found


class RunningAnswer:
    """An answer on its way: the newest token is a_`newest`."""

    def __init__(
        self, matches: Matches, number: int, texts: Mapping[str, list[int]] | None, share: _Share,
        params: SamplingParams,
    ):  # fmt: skip
        self.share = share
        self._leading: list[int] = matches.num_leading.tolist()
        self._length = matches.answer.num_tokens
        self.newest = 0
        answer = matches.answer
        limit = answer.limit if answer.limit != NO_LIMIT else _NO_LENGTH
        text = [0] * answer.stop if texts is None else texts[answer.record_id]
        self._own = text[answer.start : answer.stop]
        self.request = Request(
            str(number), text[: answer.start], params, 0, limit, frozenset(), number
        )
        self.request.tokens.append(self._own[0] if self._own else 0)

    @property
    def is_going(self) -> bool:
        return self.newest < self._length - 1

    @property
    def leading(self) -> int:
        """Drafts of the head that are right here."""
        return self._leading[self.newest]

    @property
    def following(self) -> list[int]:
        """The tokens that come."""
        return self._own[self.newest + 1 :]

    def advance(self, of_head: int, drafts: int, copy: Copy | None, policy: DraftPolicy) -> None:
        """What one round gives."""
        right = self.leading if copy is None or drafts <= of_head else drafts
        if copy is not None and drafts > of_head:
            right = copy.num_right(self.following)
        accepted = min(right, drafts)
        policy.observe(self.request, of_head, min(accepted, of_head))
        emitted = self.emit(accepted, of_head)
        if copy is not None:
            agreed = bool(of_head) and drafts > of_head
            policy.observe_copy(self.request, copy, emitted, confirmed=agreed)
        self.request.tokens += emitted

    def emit(self, accepted: int, of_head: int) -> list[int]:
        """What comes of so many drafts that are right, the first of them the head's."""
        emitted = self.following[: accepted + 1]
        self.newest += len(emitted)
        self.share.tokens += len(emitted)
        self.share.copied += max(0, min(accepted, len(emitted)) - of_head)
        return emitted
