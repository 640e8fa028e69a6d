"""Which requests copy: by what copies have been worth, and by what rows and draft steps cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from headstart.copying.drafts import Copy
from headstart.engine.auto.copied_rounds import CopiedRounds, Promise, round_with_copies
from headstart.engine.auto.copies import (
    CopyRates,
    PlannedRound,
    length_class,
    more_copied,
    with_copies,
    with_more_rows,
)
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

# A row more costs a hundredth of a round, a draft step of the head a tenth.
COSTS = RoundCosts(((1, ((0, 1.0), (16, 1.16))), (4, ((0, 1.0), (16, 1.64)))), ((1, 0.1), (4, 0.1)))
RoundSeconds = Callable[[int, float], float]


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(), 0, 100, frozenset(), 0)


def copy(length: int, count: int = 16) -> Copy:
    return Copy(list(range(100, 100 + count)), length)


def test_rates_are_learnt_from_every_round_by_length_of_the_match() -> None:
    rates, long, short = CopyRates(), copy(20), copy(3)
    before = rates.gains("a", long)
    for _ in range(40):
        rates.observe("a", long, long.tokens[:5], confirmed=False)
        rates.observe("a", short, [7], confirmed=False)
    assert rates.gains("a", long)[4] > max(0.9, before[4])
    assert rates.gains("a", short)[0] < 0.1
    assert rates.gains("b", short)[0] < 0.2, "of all requests, too"
    assert rates.gains("a", short, confirmed=True)[0] > 0.5, "nothing is known of that"
    rates.observe("a", short, short.tokens[:2], confirmed=True)
    rates.forget("a")
    assert rates.gains("a", short) == rates.gains("c", short)


def test_what_a_copy_did_not_reach_is_not_held_against_it() -> None:
    rates, long = CopyRates(), copy(40)
    for _ in range(30):
        rates.observe("a", long, [*long.tokens[:2]], confirmed=False)  # the answer went on
    assert rates.gains("a", long)[8] > 0.6


def test_classes_of_lengths() -> None:
    assert [length_class(n) for n in (3, 4, 7, 8, 15, 16, 31, 32, 4000)] == [
        2, 3, 3, 4, 4, 5, 5, 6, 6,
    ]  # fmt: skip


def test_the_faster_source_is_taken_for_each_request() -> None:
    sure, vague, lone = request("a"), request("b"), request("c")
    head = {sure: 3, vague: 3, lone: 3}
    gains = {each: [0.7, 0.5, 0.3] for each in head}
    copies = {sure: copy(30), vague: copy(3)}
    promised = {sure: [0.99**i for i in range(1, 17)], vague: [0.3, 0.1, 0.02, 0.0]}
    planned = with_copies(head, gains, copies, promised, LiveCosts(COSTS), 0)
    assert planned.copied == {sure: 16} and planned.head == {sure: 0, vague: 3, lone: 3}
    assert 0 < planned.least_gain < 0.5


def test_what_a_round_costs_is_asked_about_without_going_through_all_requests_again() -> None:
    """Regression: the work of choosing grew with the square of the requests."""

    verify = (1, ((0, 1.0), (16, 1.01))), (80, ((0, 1.0), (16, 1.5)))
    cheap = RoundCosts(verify, ((1, 0.1), (80, 0.2)))

    class Counting(LiveCosts):
        entries = 0

        def seconds_with(self, drafts: Sequence[int], more_rows: int, context: int = 0) -> float:
            self.entries += len(drafts)
            return super().seconds_with(drafts, more_rows, context)

        def seconds_at(
            self, batch: int, active: Sequence[int], more_rows: int, context: int = 0
        ) -> float:
            self.entries += len(active)
            return super().seconds_at(batch, active, more_rows, context)

    def entries(count: int) -> int:
        head = {request(str(number)): number % 4 for number in range(count)}
        gains = {each: [0.7, 0.5, 0.3] for each in head}
        copies = {each: copy(3 + number % 40) for number, each in enumerate(head)}
        promised = {each: [0.9**i for i in range(1, 17)] for each in head}
        costs = Counting(cheap)
        planned = with_copies(head, gains, copies, promised, costs, 0)
        taken, rows = list(planned.head.values()), sum(planned.copied.values())
        seconds = LiveCosts(cheap).seconds_with(taken, rows)
        tokens = sum(
            1 + sum(gains[r][: planned.head[r]]) + sum(promised[r][: planned.copied.get(r, 0)])
            for r in head
        )
        more = LiveCosts(cheap).seconds_with(taken, rows + 16) - seconds
        assert planned.least_gain == pytest.approx(tokens / seconds * more / 16)
        assert planned.copied
        return costs.entries

    assert entries(80) < 80 * 7 * 4  # requests, counts, depths and one


def test_only_as_many_tokens_are_judged_as_a_round_copies() -> None:
    rates, long = CopyRates(), copy(20, 34)
    assert len(rates.gains("a", long)) == 16
    rates.observe("a", long, long.tokens, confirmed=False)
    assert len(rates.gains("a", long)) == 16
    assert [len(own.overall.tried) for own in rates._rates.values()] == [16]


def test_rounds_with_more_rows_are_tried_where_copies_are_likely_right() -> None:
    one, other = request("a"), request("b")
    planned = PlannedRound({one: 0, other: 0}, {one: 1, other: 2})
    gains = {one: [0.95**i for i in range(1, 17)], other: [0.3, 0.1, 0.01]}
    assert with_more_rows(planned, gains).copied == {one: 13, other: 2}


def test_a_copy_goes_on_as_long_as_a_row_pays() -> None:
    assert more_copied([0.9, 0.8, 0.7, 0.2, 0.1], 2, 0.15) == 2
    assert more_copied([0.9, 0.8], 2, 0.15) == 0


def promised(gains: Sequence[float], going: float = 1.0) -> Promise:
    return Promise(gains, gains, going)


SURE = [0.99**i for i in range(1, 17)]


def test_captured_rounds_get_more_rows_where_these_pay_and_copy_in_those_there_are() -> None:
    few, many = request("a"), [request(str(number)) for number in range(30)]
    head = {few: 2, **dict.fromkeys(many, 2)}
    gains = {each: [0.6, 0.4] for each in head}

    def dear(drafts: int, rows: float) -> float:
        return 31.0 * (1 + drafts * 0.2)  # all have as many rows

    def cheap(drafts: int, rows: float) -> float:
        return 93 + rows * 0.05

    one, none = {few: promised(SURE)}, [0.01] * 16
    assert round_with_copies(head, gains, one, dear).copied == {few: 2}
    assert round_with_copies(head, gains, {few: Promise(none, SURE)}, dear).copied == {}
    assert round_with_copies(head, gains, one, cheap).copied == {few: 16}
    both = {few: promised(SURE), many[0]: Promise([0.5, *none], SURE)}
    planned = round_with_copies(head, gains, both, cheap)
    assert planned.copied == {few: 16, many[0]: 16} and planned.confirmed == {many[0]}
    assert planned.num_rows == 15, "a copy that is hardly ever right has hardly a row"
    assert planned.head == head


def test_copies_that_promise_less_go_on_after_drafts_that_agree_with_them() -> None:
    sure, unsure = request("a"), request("b")
    head = {sure: 2, unsure: 2}
    gains = {each: [0.9, 0.8] for each in head}
    copies = {sure: promised(SURE), unsure: Promise([0.6, 0.5, *[0.01] * 14], SURE)}
    planned = round_with_copies(head, gains, copies, lambda drafts, rows: 1 + rows / 99)
    assert planned.copied == {sure: 16, unsure: 16} and planned.confirmed == {unsure}
    assert planned.num_rows == 14 + 14 * 0.5, "it copies where the head agrees: in half of rounds"


def test_rows_are_for_copies_that_are_expected_to_go_on() -> None:
    requests = [request(str(number)) for number in range(8)]
    head, gains = dict.fromkeys(requests, 0), {r: list[float]() for r in requests}
    going = {r: promised(SURE, 0.25 if at < 4 else 1.0) for at, r in enumerate(requests)}
    planned = round_with_copies(head, gains, going, lambda drafts, rows: 1 + rows / 99)
    assert planned.copied == dict.fromkeys(requests, 16) and planned.num_rows == 5 * 16
    for wanted, rows in ((80, 80), (79, 79), (50, 50)):  # passes hold no more than that
        found = round_with_copies(
            head, gains, going, lambda drafts, rows: 1 + rows / 99, sizes=[16, wanted]
        )
        assert found.num_rows == rows and found.copied == planned.copied

    def dear_above(most: int) -> RoundSeconds:
        return lambda drafts, rows: 1 + (rows > most)

    found = round_with_copies(head, gains, going, dear_above(64), sizes=[32, 64, 96])
    assert found.num_rows == 64, "all have fewer rather than a larger pass"


def test_where_a_pass_has_no_more_rows_only_what_fits_into_the_usual_ones_is_copied() -> None:
    one = request("a")
    head, gains = {one: 2}, {one: [0.3, 0.1]}
    found = round_with_copies(head, gains, {one: promised(SURE)}, lambda *_: 1.0, sizes=[])
    assert found.copied == {one: 2} and found.num_rows == 0
    found = round_with_copies(head, gains, {one: promised(SURE)}, lambda *_: 1.0)
    assert found.copied == {one: 16}, "the control: rows for all"


def test_beside_a_request_that_asks_for_copies_every_copy_has_rows_for_as_many() -> None:
    policy = DraftPolicy(EngineOptions(speculate="auto"), 10**6)
    policy.use_rounds(COSTS, lambda size: size)
    fixed, free = request("fixed"), [request("a"), request("b")]
    fixed.params = replace(fixed.params, draft_from="context", speculate=16)
    copies = {each: copy(40) for each in (fixed, *free)}
    planned = policy.plan_round([fixed, *free], 3, copies)
    usual = max(planned.head.values())
    assert planned.copied == dict.fromkeys(copies, 16)
    assert planned.num_rows == 3 * (16 - usual)


def test_how_likely_copies_go_on_is_known_from_those_under_way() -> None:
    rates, one, other = CopyRates(), request("a"), request("b")
    for number in range(30):  # spans of 40 tokens, at any place of which a round may begin
        rates.observe("c", copy(40), [*copy(40).tokens[: 5 * number % 40], 7], confirmed=False)
    rounds, costs = CopiedRounds(rates), LiveCosts(COSTS, uniform=True)
    head, copies = {one: 0, other: 0}, {one: copy(40), other: copy(3)}
    gains = {one: list[float](), other: list[float]()}
    first = rounds.plan(head, gains, {one: copies[one]}, costs, 0)
    assert first.copied == {one: 16}
    promises = {r: rounds._promise(r, own) for r, own in copies.items()}
    assert promises[one].going == promises[one].gains[15] < 0.8
    assert promises[other].going == promises[other].gains[0]
    rounds.clear()
    assert rounds._promise(one, copies[one]).going == promises[one].gains[0]


def test_rows_cost_what_timed_passes_say_and_only_those_that_are_there() -> None:
    table = RoundCosts(
        ((4, ((0, 1.0), (3, 1.3))),), catch_up=((4, 0.3),), window=15,
        passes=((16, 1.0), (32, 1.0), (48, 1.7), (64, 2.0)),
    )  # fmt: skip
    costs = LiveCosts(table, uniform=True)
    assert costs.added_seconds(4, 3, 3, 10) == costs.added_seconds(4, 3, 16, 0) == 0
    assert costs.added_seconds(4, 3, 8, 10) == pytest.approx(9 * 0.02)
    assert costs.added_seconds(4, 3, 12, 17.5) == pytest.approx(0.7 + 13 * 0.02), "48 rows for 34"
    assert costs.added_seconds(4, 3, 15, 48) == pytest.approx(1.0 + 16 * 0.02)
    whole = LiveCosts(RoundCosts(table.verify, catch_up=table.catch_up, window=15), uniform=True)
    assert whole.added_seconds(4, 3, 15, 12) == whole.added_seconds(4, 3, 15, 48) > 16 * 0.02
