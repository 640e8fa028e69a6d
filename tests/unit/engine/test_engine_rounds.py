"""The host's part of rounds, with a device that only takes notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstart.backends.base import (
    DeviceRounds,
    Emitted,
    GivenCopy,
    HeadStates,
    Launched,
    RoundMasks,
    RoundRequest,
    RoundSizes,
    RoundTiming,
    SizeTimes,
    TrunkOutput,
    TrunkRows,
)
from headstart.engine.flight import MeasuredRound, RoundOutcome
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.kv_cache import BlockPool
from headstart.engine.request import Request
from headstart.engine.rounds import GivenCopies, Rounds
from headstart.engine.scheduler import Work
from headstart.sampling.params import Row, SamplingParams

AHEAD = 5  # tokens that the device says two rounds may add


@dataclass
class Result:
    """Tokens that are known in advance."""

    tokens: list[list[int]]
    drafts: list[int] = field(default_factory=list)
    num_unread: int = 0
    took: RoundTiming | None = None
    joined: TrunkOutput | None = None

    def collect(self) -> list[Emitted]:
        return [Emitted(own) for own in self.tokens]

    def timing(self) -> RoundTiming | None:
        return self.took


class Device(DeviceRounds):
    """Every round gives each request the tokens of `gives`; calls are kept in order."""

    def __init__(self, max_requests: int = 4):
        self.sizes = RoundSizes(max_requests=max_requests, max_drafts=3, num_drafts=3, max_tokens=9)
        self.window, self.takes_rows, self.fits = 16, True, 99
        self.calls: list[tuple[Any, ...]] = []
        self.admitted: list[RoundRequest] = []
        self.gives: dict[int, list[int]] = {}  # by index; otherwise one token
        self.took: RoundTiming | None = None
        self.drafts: list[list[int]] | None = None  # of a round that waits for masks

    def why_not(self, params: SamplingParams) -> str | None:
        return "log-probabilities" if params.logprobs is not None else None

    def choose_first(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[Tensor], Launched]:
        self.calls.append(("first", [(row.seed, row.position) for row in rows]))
        self.first_rows = list(rows)
        chosen = logits.argmax(-1)
        return list(chosen.unbind()), Result([[token] for token in chosen.tolist()])

    def admit(self, request: RoundRequest) -> None:
        self.admitted.append(request)

    def remove(self, index: int) -> None:
        self.calls.append(("remove", index))

    def extend(self, blocks: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        self.calls += [
            ("extend", index, start, list(own)) for index, (start, own) in blocks.items()
        ]

    def max_ahead(self, drafts: Sequence[int]) -> int:
        return AHEAD

    def joins(self, rows: Sequence[TrunkRows]) -> bool:
        return self.takes_rows

    def give(self, copies: Mapping[int, GivenCopy], most: int, rows: int) -> None:
        self.calls.append(("give", dict(copies), most, rows))

    def launch(self, drafts: Sequence[int], rows: Sequence[TrunkRows] = ()) -> Launched:
        self.calls.append(("launch", list(drafts)))
        given = [self.gives.get(index, [7]) for index in range(len(drafts))]
        states = [torch.full((len(own.tokens), 2), float(own.start)) for own in rows]
        joined = (states, torch.zeros(len(rows), 64)) if rows else None
        return Result(given, list(drafts), 1, self.took, joined)

    def fitting_rows(self, counts: Sequence[int]) -> int:
        return min(sum(counts), self.fits)

    def read(self, rows: Sequence[TrunkRows]) -> TrunkOutput:
        self.calls.append(("read", len(rows)))
        return [torch.full((len(own.tokens), 2), -1.0) for own in rows], torch.zeros(len(rows), 64)

    def is_drafting(self) -> bool:
        return False

    def drafted(self) -> list[list[int]] | None:
        return self.drafts

    def mask_room(self, rows: int, words: int) -> np.ndarray:
        return np.empty((rows, words), np.int32)

    def choose(self, masks: RoundMasks) -> None:
        self.masks = masks
        self.calls.append(("choose", {index: masks.num_fitting(index) + 1 for index in masks.ends}))

    def drain(self, lengths: Sequence[int]) -> list[HeadStates | None]:
        self.calls.append(("drain", list(lengths)))
        blank = torch.zeros(0, 2)
        return [HeadStates(torch.full((1, 2), float(length)), blank) for length in lengths]

    def warm_up(self) -> None:
        raise AssertionError("before the first request only")

    def time_rounds(self) -> list[SizeTimes]:
        raise AssertionError("before the first request only")

    def time_passes(self) -> tuple[tuple[int, float], ...]:
        raise AssertionError("before the first request only")

    def bucket(self, count: int) -> int:
        return count

    def launches(self) -> list[list[int]]:
        return [call[1] for call in self.calls if call[0] == "launch"]


def request(name: str, length: int = 3, *, max_tokens: int = 50, **settings: Any) -> Request:
    params = SamplingParams(temperature=0, **settings)
    return Request(name, list(range(length)), params, ord(name), max_tokens, frozenset(), 0)


class Host:
    """Rounds, with what the loop does around them."""

    def __init__(self, *, num_blocks: int = 40, max_requests: int = 4):
        self.device, self.pool = Device(max_requests), BlockPool(num_blocks, 2)
        self.rounds = Rounds(self.device, self.pool)

    def enter(self, *requests: Request) -> None:
        """Requests whose prompt has just been read; the first token of each is 5, 6, ..."""
        for own in requests:
            own.blocks = self.pool.allocate(-(-len(own.tokens) // 2)) or []
        logits = torch.eye(64)[5 : 5 + len(requests)]
        self.rounds.enter([Work(r, 0, len(r.tokens), ()) for r in requests], logits)
        for own in self.rounds.entering:
            self.rounds.admit(own, None)

    def advance(self, drafts: dict[Request, int] | None = None) -> list[RoundOutcome]:
        outcomes, is_launched = self.rounds.advance(drafts or {})
        assert is_launched
        for outcome in outcomes:
            outcome.request.tokens += outcome.emitted.tokens
        return outcomes


def tokens_of(outcomes: list[RoundOutcome]) -> list[tuple[str, list[int]]]:
    return [(outcome.request.id, outcome.emitted.tokens) for outcome in outcomes]


def test_only_requests_that_the_device_can_decide_are_taken() -> None:
    rounds, own = Host().rounds, request("a")
    assert rounds.takes(own)
    assert not rounds.takes(request("b", logprobs=1)), "the device says why not"


def test_copies_go_to_the_device_by_index_and_it_says_what_it_made_of_them() -> None:
    host, one, other = Host(), request("a"), request("b")
    host.device.sizes = replace(host.device.sizes, copied=8)
    host.enter(one, other)
    assert host.rounds.takes(request("c", acceptance="rejection", draft_from="context"))
    copy = GivenCopy(4, [1, 2, 3])
    host.rounds.advance({}, (), GivenCopies({other: copy}, 8, 5))
    assert ("give", {1: copy}, 8, 5) in host.device.calls
    assert host.rounds._flight is not None
    made = [Emitted([5]), Emitted([1, 2, 9], num_drafts=3, num_of_head=0)]
    host.rounds._flight.launched.collect = lambda: made
    outcomes = {each.request: each for each in host.advance()}
    assert (outcomes[other].num_drafts, outcomes[other].num_of_head) == (3, 0)
    assert outcomes[one].num_of_head is None
    assert ("give", {}, 0, 0) in host.device.calls, "nothing is copied twice"


class Even:
    """A grammar that allows even tokens."""

    def allowed(self) -> Tensor:
        return torch.arange(8) % 2 == 0

    def accept(self, token: int) -> bool:
        return token % 2 == 0

    def fork(self) -> Even:
        return self


def test_a_round_with_grammars_gets_its_masks_when_the_last_one_was_handed_out() -> None:
    host, free, held, ended = Host(), request("a"), request("b"), request("c")
    for own in (held, ended):
        own.grammar = GuardedGrammar(Even(), 8)
    host.enter(free, held, ended)
    assert [given.has_grammar for given in host.device.admitted] == [False, True, True]
    assert [row.mask is None for row in host.device.first_rows] == [True, False, False]
    host.device.drafts = [[1, 1, 1], [2, 4, 5], [2, 2, 2]]
    host.advance({own: 3 for own in (free, held, ended)})
    ended.finish_reason = "stop"
    host.rounds.complete()
    assert host.device.calls[-1] == ("choose", {1: 3}), "behind the draft that does not fit none"
    masks = host.device.masks
    assert masks.words.tolist() == [[0b01010101]] * 3, "of the even ones among 8 tokens"
    assert (list(masks.requests), list(masks.depths)) == ([1, 1, 1], [0, 1, 2])
    host.device.drafts = None
    outcomes = {outcome.request: outcome.num_drafts for outcome in host.advance()}
    assert outcomes == {free: 3, held: 2, ended: 3}
    host.rounds.complete()
    assert host.device.calls[-1][0] == "launch", "a round that does not wait gets none"


@pytest.mark.parametrize(
    ("num_blocks", "max_requests", "room"), [(40, 4, 2), (9, 4, 0), (13, 9, 2)],
    ids=["by requests", "none", "by memory"],
)  # fmt: skip
def test_there_is_room_for_requests_that_have_two_blocks_each(
    num_blocks: int, max_requests: int, room: int
) -> None:
    host = Host(num_blocks=num_blocks, max_requests=max_requests)
    host.enter(request("a"), request("b"))
    assert host.rounds.room() == room


def test_a_request_brings_what_the_device_has_to_know() -> None:
    host, own, state = Host(), request("a", 3, max_tokens=9), torch.ones(1, 2)
    own.blocks, own.states.slot = [4, 2], 6
    host.rounds.enter([Work(own, 0, 3, ())], torch.eye(8)[[5]])
    assert host.device.calls == [("first", [(ord("a"), 3)])]
    assert host.rounds.entering == [own] and own not in host.rounds.requests
    host.rounds.admit(own, state)
    assert host.rounds.entering == [] and host.rounds.requests == {own: 0}
    (given,) = host.device.admitted
    assert (given.num_tokens, given.remaining, int(given.newest)) == (4, 8, 5)
    assert (given.blocks, given.state_slot, given.states) == ([4, 2], 6, state)
    assert given.row.params is own.params and given.row.seed == own.seed
    assert (given.row.position, given.row.num_output) == (4, 1), "of the choice behind the newest"


def test_without_recurrent_layers_there_is_no_state_slot() -> None:
    host = Host()
    host.enter(request("a"))
    assert host.device.admitted[0].state_slot == -1


def test_the_first_token_arrives_with_the_next_advance() -> None:
    host, first, second = Host(), request("a"), request("b")
    host.enter(first, second)
    assert tokens_of(host.advance()) == [("a", [5]), ("b", [6])]
    late = request("c")
    host.enter(late)
    # The round that was launched before `c` came, then the first token of `c`.
    assert tokens_of(host.advance()) == [("a", [7]), ("b", [7]), ("c", [5])]
    assert host.device.launches() == [[0, 0], [0, 0, 0]]


def test_what_a_failed_step_chose_is_forgotten() -> None:
    host, own = Host(), request("a")
    host.rounds.enter([Work(own, 0, 3, ())], torch.eye(8)[[5]])
    assert host.advance() == [], "it was not admitted"
    assert host.rounds.entering == []


def test_drafts_go_to_requests_by_index_and_come_back_with_the_outcome() -> None:
    host, first, second = Host(), request("a"), request("b")
    host.enter(first, second)
    host.device.gives = {0: [1], 1: [1, 2, 3]}
    host.advance({second: 3, first: 1})
    assert host.device.launches() == [[1, 3]]
    outcomes = host.advance()
    assert [(o.request.id, o.num_drafts, o.num_unread) for o in outcomes] == [
        ("a", 1, 1), ("b", 3, 1),
    ]  # fmt: skip


def test_drafts_that_an_answer_had_no_room_for_do_not_count() -> None:
    host, own = Host(), request("a", max_tokens=3)
    host.enter(own)
    host.advance({own: 3})
    assert own.room == 2
    (outcome,) = host.advance()
    assert outcome.num_drafts == 1, "the last token is the trunk's in any case"


def test_the_last_request_takes_the_index_of_one_that_leaves() -> None:
    host = Host()
    first, second, third = (request(name) for name in "abc")
    host.enter(first, second, third)
    host.rounds.remove(first)
    assert host.rounds.requests == {third: 0, second: 1}
    host.rounds.remove(second)
    assert host.rounds.requests == {third: 0}
    assert [call for call in host.device.calls if call[0] == "remove"] == [
        ("remove", 0), ("remove", 1),
    ]  # fmt: skip
    host.advance({third: 2})
    assert host.device.launches() == [[2]]


def test_what_a_round_gave_a_request_that_has_left_is_dropped() -> None:
    host = Host()
    first, second, third = (request(name) for name in "abc")
    host.enter(first, second, third)
    host.device.gives = {0: [1], 1: [2], 2: [3]}
    host.advance()
    host.rounds.remove(first)
    # The round under way knew `c` by its old index.
    assert tokens_of(host.advance()) == [("b", [2]), ("c", [3])]
    assert tokens_of(host.advance()) == [("c", [1]), ("b", [2])]


def test_a_first_token_of_a_request_that_has_left_is_dropped() -> None:
    host, own = Host(), request("a")
    host.enter(own)
    host.rounds.remove(own)
    assert host.advance() == [] and host.device.launches() == []


def test_a_request_that_got_nothing_has_no_outcome() -> None:
    """The device had ended it already: the round ran for nothing."""
    host, own = Host(), request("a")
    host.enter(own)
    host.device.gives = {0: []}
    host.advance()
    assert host.advance() == []


def test_memory_is_taken_for_two_rounds_ahead() -> None:
    host, own = Host(), request("a", 3)
    host.enter(own)
    host.advance()
    # 3 tokens, 5 that may come and a slot for what the last row gives: 9 slots of 2.
    assert own.blocks == [0, 1, 2, 3, 4]
    assert ("extend", 0, 2, [2, 3, 4]) in host.device.calls
    extended = [call for call in host.device.calls if call[0] == "extend"]
    own.tokens.pop()  # nothing is missing then
    host.advance()
    assert [call for call in host.device.calls if call[0] == "extend"] == extended


def test_no_memory_is_taken_behind_the_end_of_an_answer() -> None:
    host, own = Host(), request("a", 3, max_tokens=1)
    host.enter(own)
    host.advance()
    assert len(own.blocks) == 3, "3 tokens, one more, and a slot"


def test_without_memory_no_round_begins_and_the_last_one_is_handed_out() -> None:
    host, own = Host(num_blocks=5), request("a", 3)
    host.enter(own)
    host.advance()
    own.tokens += [1, 1]  # as if it had got more than was expected
    outcomes, is_launched = host.rounds.advance({})
    assert not is_launched and tokens_of(outcomes) == [("a", [7])]
    assert host.device.launches() == [[0]]
    assert host.rounds.advance({})[0] == [], "nothing was under way"


def test_all_leave_with_the_states_that_their_heads_have_not_read() -> None:
    host, first, second = Host(), request("a", 3), request("b", 4)
    host.enter(first, second)
    states = host.rounds.drain()
    assert host.device.calls[-1] == ("drain", [3, 4])
    assert {r.id: own.pending.tolist() for r, own in states.items() if own is not None} == {
        "a": [[3.0, 3.0]], "b": [[4.0, 4.0]],
    }  # fmt: skip
    assert not host.rounds.requests and host.rounds.room() == 4
    host.enter(request("c"))
    assert list(host.rounds.requests.values()) == [0]


def test_a_round_is_measured_once() -> None:
    """Regression: with no round under way, the last one's time was reported again."""
    host, first, second = Host(), request("a", 3), request("b", 4)
    host.enter(first, second)
    host.device.took = RoundTiming(size=4, num_drafts=2, seconds=0.5)
    host.advance()
    assert host.rounds.measured is None, "nothing has ended yet"
    host.advance()
    assert host.rounds.measured == MeasuredRound(size=4, num_drafts=2, context=7, seconds=0.5)
    host.rounds.remove(first)
    host.rounds.remove(second)
    host.advance()
    assert host.rounds.measured is not None
    host.advance()
    assert host.rounds.measured is None


def test_work_is_cut_to_what_the_next_round_takes_best() -> None:
    host, first, second = Host(), request("a", 6), request("b", 9)
    works = [Work(first, 0, 6, ()), Work(second, 2, 7, ())]
    host.device.fits = 8
    assert host.rounds.fitting(works) == works, "no request is in"
    host.enter(request("c"))
    assert host.rounds.fitting(works) == [works[0], Work(second, 2, 2, ())]
    host.device.fits = 6
    assert host.rounds.fitting(works) == works[:1], "the other one waits for the next round"
    decoding = request("d")
    decoding.num_computed = len(decoding.tokens) - 1
    mixed = [*works, Work(decoding, 3, 1, ())]
    assert host.rounds.fitting(mixed) == mixed, "one that the host decides for would starve"


def test_rows_of_others_join_a_round_or_have_a_pass_like_it() -> None:
    host, rows = Host(), [TrunkRows([1, 2], 4, [0], 1, feeds_head=True)]
    host.rounds.advance({}, rows)
    assert host.rounds.joined is not None and host.device.calls == [("read", 1)], "none is in"
    host.rounds.advance({})
    assert host.rounds.joined is None and host.device.calls == [("read", 1)]
    host.enter(request("a"))
    host.rounds.advance({}, rows)
    assert host.rounds.joined is not None
    states, logits = host.rounds.joined
    assert [own.tolist() for own in states] == [[[4.0, 4.0]] * 2] and logits.shape == (1, 64)
    host.rounds.advance({})
    assert host.rounds.joined is None, "none came with this one"
    host.device.takes_rows = False
    host.rounds.advance({}, rows)
    assert host.rounds.joined is None, "they run by themselves"
