"""What `auto` would bring: its own policy, played over answers whose right drafts are known.

Copies are found in the texts themselves, by the code that serves. All answers are played by one
policy, in their order: what it learns of one category it knows in the next, as an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression

from headstart.copying.drafts import Copy
from headstart.engine.auto.copies import PlannedRound
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.host_times import Deciding
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.auto.served_costs import RoundTimes
from headstart.engine.copies import ContextDrafter
from headstart.engine.options import MAX_DRAFTS, EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import DraftFrom, SamplingParams
from headstart.simulate.answers import GREEDY, NO_LIMIT
from headstart.simulate.cost import Costs
from headstart.simulate.matches import Matches

_NO_LENGTH = 1 << 40

Place = tuple[str, int]  # of an answer: its record, and where it begins there


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


def host_speed(
    answers: Sequence[Matches], texts: Mapping[str, list[int]], times: RoundTimes, max_drafts: int,
    source: DraftFrom, from_answers: int = 0,
) -> Played:  # fmt: skip
    """In rounds of the host, by the head ("head"), copies ("context") or both ("auto").

    The speed is that over an engine without a head; deciding counts. `texts` are token ids by
    record; copies come from so many earlier answers, too.
    """
    assert times.host is not None
    requests, has_head = times.requests, source != "context"
    table = RoundCosts(((requests, times.host.verify[source]),))
    play = HostPlay(
        EngineOptions(
            speculate="auto" if has_head else "context", draft_from_answers=from_answers
        ),
        _with_head(table, times, requests, max_drafts) if has_head else table,
        times, max_drafts if has_head else 0, None if source == "head" else texts,
        times.host.deciding[source],
    )  # fmt: skip
    return play.run(answers)


def _with_head(known: RoundCosts, costs: Costs, requests: int, max_drafts: int) -> RoundCosts:
    """The same costs with what the head's steps take beside their rows: nearly a line."""
    drafts = range(1, max_drafts + 1)
    beside = [costs.round_seconds(requests, k) - known.round_seconds(requests, k) for k in drafts]
    step, start = max(0.0, beside[0]), 0.0
    if max_drafts > 1:
        step, start = (max(0.0, each) for each in linear_regression(drafts, beside))
    return RoundCosts(known.verify, ((requests, step),), ((requests, start),))


class Play:
    """A batch of answers that is kept full, round by round; the host drives rounds."""

    def __init__(
        self, options: EngineOptions, table: RoundCosts, requests: int, max_drafts: int,
        texts: Mapping[str, list[int]] | None = None, params: SamplingParams = GREEDY,
    ):  # fmt: skip
        self._policy, self._table = DraftPolicy(options, _NO_LENGTH, table), table
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

    def _beside(self, drafts: float, context: int) -> float:
        """What a round takes beside what the table says, with so many drafts of each request."""
        return 0.0

    def _deciding(self, *, could_copy: bool) -> float:
        """What choosing drafts takes of a round."""
        return 0.0

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
        table, size = self._table, len(running)
        rows, context = size, sum(len(request.tokens) for request in requests)
        for request, each in requests.items():
            of_head, copy = drafting.get(request, 0), copies.get(request)
            drafts = _drafts(each, of_head, copy, planned, self._policy.more_copied)
            rows += drafts
            each.advance(of_head, drafts, copy, self._policy)
        took = table.verify_seconds(size, rows) + self._beside(rows / size - 1, context)
        self._policy.observe_verify(list(requests), rows, took)
        deepest = max(drafting.values(), default=0)
        active = [sum(k > depth for k in drafting.values()) for depth in range(deepest)]
        took += self._deciding(could_copy=bool(copies))
        return took + table.start_seconds(len(drafting)) + sum(map(table.draft_seconds, active))

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


class HostPlay(Play):
    """The same with what was timed of an engine: what context adds, and what deciding takes."""

    def __init__(
        self, options: EngineOptions, table: RoundCosts, times: RoundTimes, max_drafts: int,
        texts: Mapping[str, list[int]] | None, deciding: Deciding,
    ):  # fmt: skip
        super().__init__(options, table, times.requests, max_drafts, texts)
        assert times.host is not None
        self._times, self._host, self._taken = times, times.host, deciding

    def _plain_seconds(self, context: int) -> float:
        return self._times.round_seconds(self._requests, 0) + self._host.added(0, context)

    def _beside(self, drafts: float, context: int) -> float:
        return self._host.added(drafts, context)

    def _deciding(self, *, could_copy: bool) -> float:
        return self._taken.copying if could_copy else self._taken.usual


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
