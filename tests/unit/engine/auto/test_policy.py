"""Which K is chosen, with costs and acceptance made up: no model, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headstart.copying.drafts import Copy
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.options import MENU, EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

Accept = Callable[[int], bool]  # whether the draft at a depth (from 0) is right


def always(depth: int) -> bool:
    return True


def never(depth: int) -> bool:
    return False


def linear(row: float = 0.02, draft: float = 0.05) -> RoundCosts:
    """A verification costs 1 and `row` for each row beyond the first of a request."""
    verify = tuple((batch, tuple((k, 1 + row * batch * k) for k in MENU)) for batch in (1, 2))
    return RoundCosts(verify, draft=((1, draft), (2, draft)))


def auto(costs: Any = None, **options: Any) -> DraftPolicy:
    return DraftPolicy(EngineOptions(speculate="auto", **options), 10**6, costs or linear())


def request(name: str, max_tokens: int = 10**5, speculate: Any = None) -> Request:
    params = SamplingParams(temperature=0, speculate=speculate)
    return Request(name, [1, 2], params, 0, max_tokens, frozenset(), 0)


def play(
    own: DraftPolicy, requests: Sequence[Request], rounds: int, accept: dict[Request, Accept]
) -> list[dict[str, int]]:
    """Rounds as the engine plays them; the K of every request, by round."""
    history = []
    for _ in range(rounds):
        chosen = own.choose(requests, num_running=len(requests))
        for one, drafts in chosen.items():
            right = 0
            while right < drafts and accept[one](right):
                right += 1
            own.observe(one, drafts, right)
            one.tokens += [0] * (right + 1)
        history.append({one.id: drafts for one, drafts in chosen.items()})
    return history


def play_one(own: DraftPolicy, rounds: int, accept: Accept, name: str = "a") -> list[int]:
    one = request(name)
    return [chosen[name] for chosen in play(own, [one], rounds, {one: accept})]


def test_a_head_that_is_never_right_is_left_alone_but_for_a_try_now_and_then() -> None:
    history = play_one(auto(), 600, never)
    late = history[100:]
    assert late.count(0) > 0.9 * len(late)
    assert late.count(1) > 3, "it would not be noticed if it became right"
    assert max(late) <= 2 and late.count(2) <= 3


def test_a_head_that_is_always_right_drafts_as_many_as_pay() -> None:
    assert play_one(auto(), 200, always)[-1] == 8


def test_the_number_stops_where_another_draft_costs_more_than_it_brings() -> None:
    """Always right, and the fourth draft costs ten rounds."""

    steep = tuple((k, 1 + 0.02 * k + (10 if k > 3 else 0)) for k in range(9))
    assert play_one(auto(RoundCosts(((1, steep),), draft=((1, 0.05),))), 200, always)[-1] == 3


def test_a_draft_that_is_right_half_of_the_time_pays_or_not_by_its_cost() -> None:
    def half() -> Accept:
        turns = iter(range(10**6))
        return lambda depth: next(turns) % 2 == 0

    assert play_one(auto(linear(0.02, 0.05)), 200, half())[-1] >= 1
    late = play_one(auto(linear(0.4, 0.4)), 300, half())[-100:]
    assert late.count(0) >= 95


def test_answers_shorter_than_the_pause_between_tries_are_tried_as_well() -> None:
    """Regression: each request counted its own rounds, and none lived to its first try."""
    own = auto(linear(0.1, 0.15))
    play_one(own, 1000, never)
    used = []
    for number in range(60):
        name = f"short {number}"
        one = request(name)
        used += [k[name] for k in play(own, [one], 20, {one: always})]
        own.forget(one)
    assert used[-1] >= 3
    first = next(i for i, k in enumerate(used) if k >= 2)
    assert first < 400, "recovery takes too long"


def test_a_long_answer_that_becomes_easy_is_drafted_again() -> None:
    own = auto(linear(0.1, 0.15))
    one = request("a")
    play(own, [one], 500, {one: never})
    history = [k["a"] for k in play(own, [one], 400, {one: always})]
    assert history[-1] >= 3


def test_each_request_gets_its_own_k() -> None:
    """Regression: one K for all; a hopeless request drafted because the others should."""
    own = auto()
    good = [request(f"good {i}") for i in range(7)]
    bad = request("bad")
    accept: dict[Request, Accept] = {**dict.fromkeys(good, always), bad: never}
    last = play(own, [*good, bad], 200, accept)[-1]
    assert last["bad"] <= 1
    assert all(last[one.id] == 8 for one in good)
    late = play(own, [*good, bad], 100, accept)
    assert sum(k["bad"] for k in late) <= 4


def test_a_newcomer_begins_like_the_others_and_does_not_wait_for_a_large_promise() -> None:
    own = auto()
    old = [request(f"old {i}") for i in range(30)]
    play(own, old, 100, dict.fromkeys(old, always))
    newcomer = request("new")
    assert own.choose([*old, newcomer], num_running=31)[newcomer] >= 6


def test_a_small_advantage_changes_nothing() -> None:
    """The draft's cost moves around the point where it pays; the choice does not follow."""

    chosen = {}
    for first in (0.5, 2.0):
        own, one = auto(linear(0.3, first * 0.35)), request("a", 10**6)
        turns = iter(range(10**7))
        accept: dict[Request, Accept] = {one: lambda depth, t=turns: depth < 1 and next(t) % 3 > 0}
        play(own, [one], 150, accept)
        assert own._costs is not None and own._costs is own._greedy_costs
        own._costs.use(linear(0.3, 0.35))
        history = [k["a"] for k in play(own, [one], 50, accept)]
        chosen[first] = max(set(history), key=history.count)
    assert chosen == {0.5: 1, 2.0: 0}


def test_live_times_overrule_a_profile_that_is_too_good() -> None:
    """Always right, but a round with drafts really takes ten times as long."""
    own = auto()
    one = request("a")
    real = linear(row=3.0, draft=0.05)
    history = []
    for _ in range(2500):
        chosen = own.choose([one], num_running=1)[one]
        own.observe(one, chosen, chosen)
        own.observe_verify([one], 1 + chosen, real.verify_seconds(1, 1 + chosen))
        own.observe_drafts({one: chosen} if chosen else {}, chosen * 0.05)
        history.append(chosen)
    late = history[-500:]
    assert late.count(0) > 0.8 * len(late), late[-50:]


def test_one_draft_more_is_tried_now_and_then() -> None:
    """Second drafts are wrong for a while: K becomes 1, and 2 when they are right again."""
    own, one = auto(linear(row=0.02, draft=0.1)), request("a", 10**6)
    early = [k["a"] for k in play(own, [one], 400, {one: lambda depth: depth < 1})][200:]
    assert max(set(early), key=early.count) == 1
    assert 2 <= early.count(2) <= len(early) // 8
    late = [k["a"] for k in play(own, [one], 2600, {one: always})]
    assert max(set(late[-200:]), key=late[-200:].count) >= 3


def test_requests_that_share_one_k_try_nothing_deeper() -> None:
    table = linear(row=0.02, draft=0.1)
    own, one = auto(table), request("a", 10**6)
    play(own, [one], 400, {one: lambda depth: depth < 1})
    whole = RoundCosts(((1, tuple((k, table.round_seconds(1, k)) for k in MENU)),))
    own.uniform_costs = LiveCosts(whole, uniform=True)
    chosen = [own.choose([one], num_running=1, uniform=True)[one] for _ in range(200)]
    assert set(chosen) <= {0, 1} and chosen.count(1) > 190


def test_greedy_requests_have_costs_of_their_own() -> None:
    """A draw costs as much as the trunk: drafts pay only for requests that do not."""
    drawn = linear(row=1.0)
    own = DraftPolicy(EngineOptions(speculate="auto"), 10**6, drawn, linear())
    greedy, sampled = request("greedy"), request("sampled")
    sampled.params = SamplingParams(temperature=1)
    for one in (greedy, sampled):
        for _ in range(20):
            own.observe(one, 3, 2)
    assert own.choose([greedy], num_running=1)[greedy] >= 2
    assert own.choose([sampled], num_running=1)[sampled] == 0
    assert own.choose([sampled, greedy], num_running=2) == {sampled: 0, greedy: 0}


def test_now_and_then_a_round_without_drafts_is_timed() -> None:
    history = play_one(auto(), 600, always)
    assert 1 <= history[20:].count(0) <= 3


def test_drafting_is_off_above_a_number_of_running_requests_prompts_included() -> None:
    """Regression: only requests that had just got a token were counted."""
    own = auto(speculate_off_above=2)
    one = request("a")
    assert own.choose([one], num_running=2)[one] > 0
    assert own.choose([one], num_running=3) == {one: 0}
    assert own.reason == "3 requests run, more than speculate_off_above 2"
    assert own.decided_by == "off_above"
    own.choose([one], num_running=2)
    assert own.decided_by == "fastest"


def test_the_reason_stays_while_nobody_decides() -> None:
    """Regression: a step that only read prompts wiped it."""
    own = auto()
    own.choose([request("a")], num_running=1)
    assert "tokens/s" in own.reason
    before = own.reason
    assert own.choose([], num_running=1) == {}
    assert own.reason == before


def test_the_last_token_of_an_answer_says_nothing_about_the_next() -> None:
    """Regression: where nothing could be drafted any more, that became the reason and the start."""
    own = auto()
    play_one(own, 100, always)
    before = own.reason
    assert own.choose([request("last", max_tokens=1)], num_running=1).popitem()[1] == 0
    assert own.reason == before
    assert own.choose([request("new")], num_running=1).popitem()[1] == 8


def test_fixed_numbers_are_kept_beside_auto_and_end_with_the_answer() -> None:
    own = auto()
    fixed, free = request("f", speculate=5), request("a")
    short = request("s", max_tokens=3, speculate=5)
    chosen = own.choose([fixed, free, short], num_running=3)
    assert (chosen[fixed], chosen[short]) == (5, 2)
    assert chosen[free] > 0
    nearly = request("n", max_tokens=2)
    play(own, [free], 100, {free: always})
    assert own.choose([nearly], num_running=1)[nearly] == 1
    assert own.choose([request("l", max_tokens=1)], num_running=1).popitem()[1] == 0


@pytest.mark.parametrize("speculate", [0, 3])
def test_a_fixed_number_needs_no_costs(speculate: int) -> None:
    own = DraftPolicy(EngineOptions(speculate=speculate), 100)
    assert own.decided_by == "fixed"
    one = request("a")
    assert own.choose([one], num_running=1) == {one: speculate}
    assert own.reason == own.decided_by == "fixed"


def test_the_expected_speed_up_is_that_of_many_rounds_not_of_the_last() -> None:
    """A text that is easy for a while and then hard: one round changes little."""
    own, one = auto(), request("a")
    play(own, [one], 300, {one: always})
    easy = own.expected_speedup
    assert easy is not None and easy > 2
    other = request("b", max_tokens=1)  # no room for a draft
    own.choose([other], num_running=1)
    assert own.expected_speedup == easy
    play(own, [one], 1, {one: never})
    assert own.expected_speedup == pytest.approx(easy, rel=0.02)
    play(own, [one], 1500, {one: never})
    assert own.expected_speedup == pytest.approx(1, abs=0.05)


def test_costs_that_are_shown_are_those_of_the_requests_that_ran_last() -> None:
    """Regression: what sampled rounds cost was shown while all requests were greedy."""
    sampled, greedy = linear(0.02, 0.5), linear(0.02, 0.05)
    own = DraftPolicy(EngineOptions(speculate="auto"), 10**6, sampled, greedy)
    hot = Request("hot", [1, 2], SamplingParams(temperature=1), 0, 10**5, frozenset(), 0)
    for one, table in ((request("cold"), greedy), (hot, sampled), (request("again"), greedy)):
        own.choose([one], num_running=1)
        assert own.round_seconds(1, 3) == pytest.approx(table.round_seconds(1, 3))


def test_one_draft_less_is_tried_as_well_and_what_promises_little_seldom() -> None:
    own, one = auto(linear(row=0.02, draft=0.05)), request("a", 10**6)
    late = [k["a"] for k in play(own, [one], 900, {one: lambda depth: depth < 4})][300:]
    usual = max(set(late), key=late.count)
    assert usual == 4
    assert 1 <= late.count(3) <= len(late) // 10 and 1 <= late.count(5) <= len(late) // 10
    assert late.count(0) <= 4


@pytest.mark.parametrize("speculate", [3, "auto"])
def test_requests_that_have_ended_leave_nothing_behind(speculate: Any) -> None:
    """Regression: with a fixed K what copies were worth stayed for ever."""
    own = DraftPolicy(EngineOptions(speculate=speculate), 10**6, linear())
    for number in range(3):
        one = request(str(number))
        own.observe_copy(one, Copy([1, 2, 3], 4), [1, 2], confirmed=False)
        own.forget(one)
    assert not any(rates._own for rates in own.copy_rates._rates.values())
