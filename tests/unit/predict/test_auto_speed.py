"""What `auto` would bring does not depend on how many answers there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from headstart.engine.auto.costs import Curve, RoundCosts
from headstart.engine.auto.host_times import Deciding, HostTimes, SourceTimes
from headstart.engine.auto.served_costs import CapturedCosts, RoundTimes
from headstart.engine.options import MENU
from headstart.predict.auto_speed import Speed, head_speed
from headstart.predict.captured_speed import captured_speed
from headstart.predict.host_speed import host_speed
from headstart.sampling.params import DraftFrom
from headstart.simulate.answers import Answer
from headstart.simulate.copies import ReplayedCopies
from headstart.simulate.cost import CostTable
from headstart.simulate.matches import Matches

COSTS = CostTable(trunk=1.0, draft=0.1)


def answer(tokens: int, *, name: str = "a", is_right: bool = True) -> Matches:
    made = Answer(record_id=name, prompt_id=name, start=3, stop=3 + tokens)
    return Matches(made, torch.full((tokens - 1, 3), is_right))


def speed(answers: Sequence[Matches], requests: int) -> float | None:
    found = head_speed(answers, COSTS, requests, 3).of(answers)
    return None if found is None else found.speed_up


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_few_answers_fill_the_batch(number: int) -> None:
    found = speed([answer(200)] * number, 4)
    assert found == pytest.approx(4 / 1.3, rel=0.1), "four tokens a round, which costs 1.3"


def test_answers_without_rounds_are_left_out() -> None:
    assert speed([answer(1)], 1) is None
    alone = speed([answer(200)], 1)
    assert speed([answer(1, name="b"), answer(200)], 1) == alone
    wrong = speed([answer(200, is_right=False)], 1)
    assert alone is not None and wrong is not None and wrong < 1.05 < alone


@pytest.mark.parametrize("requests", [1, 2])
def test_parts_are_played_together_and_counted_apart(requests: int) -> None:
    """What is learned of one answer is known in the next; their seconds are their own."""
    right = [answer(100, name=f"right {i}") for i in range(2)]
    wrong = [answer(100, name=f"wrong {i}", is_right=False) for i in range(2)]
    played = head_speed([*right, *wrong], COSTS, requests, 3)
    good, bad, both = map(played.of, (right, wrong, [*right, *wrong]))
    assert good is not None and bad is not None and both is not None
    assert bad.speed_up < 1 < both.speed_up < good.speed_up, "drafts are tried on answers to come"
    assert played.of([answer(100, name="another")]) is None


FREE_ROWS = ((0, 1.0), (16, 1.0))  # verifying copies costs nothing more
NOTHING = Deciding(0.0, 0.0)


def times(
    rounds: Curve = FREE_ROWS, deciding: Deciding = NOTHING, profiled: Curve | None = None
) -> RoundTimes:
    """Rounds as they are timed; each of the head's drafts takes a tenth of one without."""
    sources: list[DraftFrom] = ["head", "auto", "context"]
    every, none = (tuple((k, share) for k, _ in rounds) for share in (1.0, 0.0))
    own = SourceTimes(rounds, every, none, deciding, profiled or rounds)
    host = HostTimes(dict.fromkeys(sources, own))
    return RoundTimes((1.0, 1.1, 1.2, 1.3), 1, host)


def copies_of(
    repeats: bool, *, source: DraftFrom, is_right: bool, known: RoundTimes | None = None
) -> Speed:
    """Of an answer of 200 tokens that repeats its prompt, or has nothing in common with it."""
    prompt, other = [*range(200)], [*range(200, 400)]
    made = Answer(record_id="a", prompt_id="a", start=200, stop=400)
    matches = Matches(made, torch.full((199, 3), is_right))
    texts = {"a": [*prompt, *(prompt if repeats else other)]}
    found = host_speed([matches], texts, known or times(), 3, source).of([matches])
    assert found is not None
    return found


@pytest.mark.parametrize(("repeats", "longer"), [(True, 2.0), (False, 0.5)])
def test_deciding_takes_time_in_every_round(repeats: bool, longer: float) -> None:
    """More where something could be copied."""
    known = times(deciding=Deciding(0.5, 2.0))
    for source in ("context", "auto"):
        without = copies_of(repeats, source=source, is_right=False)
        found = copies_of(repeats, source=source, is_right=False, known=known)
        rounds = 1 / without.speed_up  # of one second each, by token
        assert 1 / found.speed_up == pytest.approx((1 + longer) * rounds, rel=0.12)


def test_the_head_alone_is_that_of_the_engine_that_keeps_it_ready() -> None:
    """Rounds without drafts take longer than those of an engine without a head."""
    ready = replace(times(((0, 1.1), (16, 1.1))), seconds=(1.0, 1.2, 1.3, 1.4))
    wrong = copies_of(True, source="head", is_right=False, known=ready)
    assert wrong.speed_up == pytest.approx(1 / 1.1, rel=0.03) and wrong.copied_share == 0
    right = copies_of(True, source="head", is_right=True, known=ready)
    assert right.speed_up == pytest.approx(4 / 1.4, rel=0.1)


@pytest.mark.parametrize("source", ["context", "auto"])
def test_an_answer_that_repeats_its_prompt_is_copied(source: DraftFrom) -> None:
    """Two rounds until three tokens agree, then 17 tokens in each; a round costs 1."""
    found = copies_of(True, source=source, is_right=False)
    assert found.speed_up == pytest.approx(199 / 14, rel=0.15)
    assert found.copied_share == pytest.approx(185 / 199, rel=0.05)
    beside = copies_of(True, source="auto", is_right=True)
    assert beside.speed_up > 13 and beside.copied_share > 0.85, "copies are faster than the head"


STEEP_ROWS = ((0, 1.0), (1, 1.2), (2, 1.4), (3, 1.6), (5, 2.0), (8, 4.0), (16, 9.0))


def test_a_policy_begins_with_what_its_engine_profiles_and_corrects_it() -> None:
    """Rounds of many copies that are thought to be cheap are tried until they have shown that they
    are not."""
    known = copies_of(True, source="context", is_right=False, known=times(STEEP_ROWS))
    assert known.speed_up == pytest.approx(47 / 19, rel=0.1), "one round in six copies 16 tokens"
    wrong = copies_of(
        True, source="context", is_right=False, known=times(STEEP_ROWS, profiled=FREE_ROWS)
    )
    assert 17 / 9 <= wrong.speed_up < 0.9 * known.speed_up


def test_an_answer_that_repeats_nothing_is_not_copied() -> None:
    alone = copies_of(False, source="context", is_right=True)
    assert alone.copied_share == 0 and alone.speed_up == pytest.approx(1, rel=0.01)
    beside = copies_of(False, source="auto", is_right=True)
    assert beside.copied_share == 0 and beside.speed_up == pytest.approx(4 / 1.3, rel=0.1)


def two_alike() -> tuple[list[Matches], dict[str, list[int]]]:
    """The second answer is the first one again; neither has anything in common with its prompt."""
    texts = {name: [*range(start, start + 200), *range(200)]
             for name, start in (("a", 200), ("b", 400))}  # fmt: skip
    made = [Answer(record_id=name, prompt_id=name, start=200, stop=400) for name in texts]
    return [Matches(one, torch.full((199, 3), fill_value=False)) for one in made], texts


@pytest.mark.parametrize("source", ["context", "auto"])
def test_answers_are_copied_by_those_that_come_after_them(source: DraftFrom) -> None:
    matches, texts = two_alike()
    for count, least in ((0, 0.0), (1, 0.8)):
        played = host_speed(matches, texts, times(), 3, source, count)
        first, second = (played.of([each]) for each in matches)
        assert first is not None and first.copied_share == 0
        assert second is not None and second.copied_share >= least
        assert count or second.copied_share == 0


def test_captured_rounds_copy_from_answers_too() -> None:
    matches, texts = two_alike()
    curve = tuple((k, 1.0 + 0.1 * k) for k in MENU)
    table = RoundCosts(((1, curve),), passes=((8, 1.0), (12, 1.02), (64, 1.2)))
    costs = CapturedCosts(table, 1)
    for count in (0, 1):
        played = captured_speed(matches, texts, costs, 1, 3, with_head=False, from_answers=count)
        first, second = (played.of([each]) for each in matches)
        assert first is not None and first.copied_share == 0
        assert second is not None and (second.copied_share > 0.7) == (count > 0)


def test_a_store_that_is_too_small_has_lost_the_answer() -> None:
    """Lengths of copies alone, by number of drafts: the answer between took the only place."""
    (first, again), texts = two_alike()
    between = replace(first.answer, record_id="c", prompt_id="c")
    texts["c"] = [*range(600, 1000)]
    for count, last in ((1, 1.0), (2, 199 / (7 + 12))):  # eight tokens must agree, then 17 a round
        found = ReplayedCopies.of([first, replace(first, answer=between), again], texts, 16, count)
        assert found.lengths([again])[16] == pytest.approx(last, rel=0.1)
        assert found.lengths([first])[16] == 1


def test_copies_are_not_taken_where_rows_cost_too_much() -> None:
    dear = times(((0, 1.0), (1, 3.0), (16, 33.0)))
    found = copies_of(True, source="context", is_right=False, known=dear)
    assert found.copied_share == 0 and found.speed_up == pytest.approx(1, rel=0.01)


def test_context_counts_in_every_round() -> None:
    """A token of it adds as much to every round: of 300 tokens and more the speed-up is less."""
    known = times()
    assert known.host is not None
    host = replace(known.host, context=100.0, per_token=((0, 0.001), (3, 0.01)))
    found = copies_of(False, source="head", is_right=True, known=replace(known, host=host))
    plain, drafting = (1 + each * (300 - 100) for each in (0.001, 0.01))
    assert found.speed_up == pytest.approx(4 * plain / (drafting + 0.3), rel=0.1)
    at = replace(known, host=host).at(300.0)
    assert at.seconds[0] == pytest.approx(plain) and at.seconds[3] == pytest.approx(drafting + 0.3)
