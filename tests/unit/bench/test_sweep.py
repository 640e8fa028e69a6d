"""Cells held against each other: speed-ups, crossovers, equal answers, advice."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.bench_records import request, run

from headstart.bench.advice import advice
from headstart.bench.cells import Cell, make_cells
from headstart.bench.cost import parse_prices
from headstart.bench.records import Failure, RunRecord, Speculation, VariantRecord
from headstart.bench.rows import comparison_rows
from headstart.bench.sweep import Comparison, compare_cells, crossovers
from headstart.bench.tasks import answer_lines


def one_run(
    variant: str, seconds: float, *, concurrency: int = 1, turned: bool = False, **fields: Any
) -> RunRecord:
    """Eight answers of ten tokens, one after the other on each stream, each in about `seconds`."""
    wobble = (0.98, 1.0, 1.02, 0.99, 1.01, 1.0, 0.97, 1.03)[:: -1 if turned else 1]
    answers = [
        request(
            [(0.1 * seconds, 1), (w * seconds, 9)], id=f"q{i}", prompt_tokens=5, text="same",
            end_seconds=w * seconds,
        )
        for i, w in enumerate(wobble)
    ]  # fmt: skip
    given = {"duration_seconds": 8 * seconds / concurrency, "concurrency": concurrency}
    return run(*answers, variant=variant, **(given | fields))


def cells_of(*runs: RunRecord) -> list[Cell]:
    names = dict.fromkeys(one.variant for one in runs)
    records = [
        VariantRecord(name=n, url="http://x", runs=tuple(r for r in runs if r.variant == n))
        for n in names
    ]
    return make_cells(records, None)


def compared(*runs: RunRecord) -> list[Comparison]:
    return compare_cells(cells_of(*runs), "K=0", prices=None, is_greedy=True)


def test_repeats_are_pooled_by_their_time() -> None:
    fast, slow = one_run("K=0", 1.0), one_run("K=0", 3.0, repeat=1)
    (cell,) = cells_of(fast, slow)
    assert cell.measures.num_answered == 16
    # 160 tokens in 8 + 24 seconds, not the mean of 10 and 3.33 tokens a second.
    assert cell.measures.output_tokens_per_second == pytest.approx(5.0)


def test_a_speed_up_is_the_ratio_of_throughputs_in_a_closed_loop() -> None:
    (found,) = compared(one_run("K=0", 1.0), one_run("K=3", 0.5))
    assert found.speed_up is not None and found.speed_up.value == pytest.approx(2.0)
    assert found.speed_up.is_noise is False
    assert found.tpot is not None and found.tpot.value == pytest.approx(0.5)
    assert found.answers is not None and found.answers.num_equal == 8


def test_an_open_loop_is_compared_by_latency_since_the_rate_decides_the_throughput() -> None:
    plain, drafted = (
        replace(found, rate=2.0, concurrency=None, duration_seconds=9.0)
        for found in (one_run("K=0", 1.0), one_run("K=3", 0.5))
    )
    (found,) = compared(plain, drafted)
    assert found.speed_up is not None and found.speed_up.value == pytest.approx(2.0)
    assert found.output_tokens_per_second is not None
    assert found.output_tokens_per_second.value == pytest.approx(1.0)


def test_savings_follow_the_throughput() -> None:
    cells = cells_of(one_run("K=0", 1.0), one_run("K=3", 0.8))
    (found,) = compare_cells(cells, "K=0", prices=parse_prices(["2"], 1), is_greedy=False)
    assert found.savings == {"on-demand": pytest.approx(0.2)}
    assert found.answers is None  # sampled answers are not held against each other


def sweep(*speed_ups: tuple[int, float]) -> list[Comparison]:
    runs = []
    for concurrency, speed_up in speed_ups:
        runs.append(one_run("K=0", 1.0, concurrency=concurrency))
        runs.append(one_run("K=3", 1.0 / speed_up, concurrency=concurrency))
    return compared(*runs)


def test_a_crossover_lies_between_the_last_faster_and_the_first_slower_load() -> None:
    (found,) = crossovers(sweep((1, 1.5), (4, 1.2), (16, 0.8), (64, 0.7)))
    assert (found.last_faster, found.first_slower) == (4, 16)
    assert found.estimate == pytest.approx(8.0)  # half way, on a scale of doublings


def test_there_is_no_crossover_where_one_side_wins_everywhere() -> None:
    (always,) = crossovers(sweep((1, 1.5), (4, 1.2)))
    assert (always.last_faster, always.first_slower, always.estimate) == (4, None, None)
    (never,) = crossovers(sweep((1, 0.9), (4, 0.8)))
    assert (never.last_faster, never.first_slower) == (None, 1)
    assert crossovers(sweep((1, 1.5))) == []


def test_a_load_without_an_interval_is_no_evidence_of_a_crossover() -> None:
    """One answer has no spread: that it was slower is not known to be more than chance."""
    runs = []
    for concurrency, seconds in ((1, 0.5), (4, 0.7), (16, 1.5)):
        for variant, own in (("K=0", 1.0), ("K=3", seconds)):
            whole = one_run(variant, own, concurrency=concurrency)
            runs.append(whole if concurrency < 16 else replace(whole, requests=whole.requests[:1]))
    (found,) = crossovers(compared(*runs))
    assert (found.last_faster, found.first_slower) == (4, None)
    assert "off" not in told(*runs)
    sure = [one_run(run.variant, 1.5 if run.variant == "K=3" else 1.0, concurrency=16)
            if run.concurrency == 16 else run for run in runs]  # fmt: skip
    assert "stops to pay between 4 and 16 streams" in told(*sure)


def test_what_was_never_surely_faster_does_not_stop_to_pay() -> None:
    text = told(
        one_run("K=0", 1.0), one_run("K=3", 0.999, turned=True),
        one_run("K=0", 1.0, concurrency=8), one_run("K=3", 1.5, concurrency=8),
    )  # fmt: skip
    assert "slower from 8 streams and nowhere faster beyond noise: leave it off" in text
    assert "stops to pay" not in text


def told(*runs: RunRecord) -> str:
    cells = cells_of(*runs)
    found = compare_cells(cells, "K=0", prices=None, is_greedy=True)
    return "\n".join(advice(cells, found, crossovers(found), {"K=0": 0, "K=3": 3}))


def test_advice_names_the_fastest_variant_of_each_load_and_where_to_turn_it_off() -> None:
    text = told(
        one_run("K=0", 1.0), one_run("K=3", 0.5),
        one_run("K=0", 1.0, concurrency=8), one_run("K=3", 1.5, concurrency=8),
    )  # fmt: skip
    assert "1 stream: use K=3, 2.00 times as fast as K=0." in text
    assert "8 streams: use K=0; nothing else was faster beyond noise." in text
    assert "not decided" not in text
    assert "--speculate-off-above 1" in text


def test_a_difference_that_may_be_noise_is_not_advised() -> None:
    text = told(one_run("K=0", 1.0), one_run("K=3", 0.98, turned=True))
    assert "stay with K=0; nothing else was faster beyond noise" in text
    assert re.search(r"1 stream: not decided, K=3 was 1\.02 \(0\.\d\d to 1\.\d\d\) times", text)


@pytest.mark.parametrize(
    ("accepted", "rounds", "is_low"),
    [(150, 300, True), (210, 300, False), (175, 300, False), (1, 8, False)],
    ids=["surely low", "high", "may be noise", "too few"],
)
def test_a_head_that_is_surely_wrong_too_often_is_pointed_out(
    accepted: int, rounds: int, is_low: bool
) -> None:
    counted = Speculation(
        source="headstart", rounds=rounds, draft_tokens=rounds, accepted_tokens=accepted,
        drafted_per_depth=(rounds,), accepted_per_depth=(accepted,),
    )  # fmt: skip
    text = told(one_run("K=0", 1.0), one_run("K=3", 0.5, speculation=counted))
    assert ("under 0.60" in text) == is_low


def with_cached(found: RunRecord, cached: int) -> RunRecord:
    known = tuple(replace(one, cached_tokens=cached) for one in found.requests)
    return replace(found, requests=known)


@pytest.mark.parametrize(("of_base", "is_comparable"), [(0, False), (4, True)])
def test_who_asked_second_does_not_win_by_the_prefix_cache(
    of_base: int, is_comparable: bool
) -> None:
    runs = [with_cached(one_run("K=0", 1.0), of_base), with_cached(one_run("K=3", 0.5), 4)]
    (found,) = compared(*runs)
    assert found.cached_shares == (of_base / 5, 0.8) and found.is_comparable == is_comparable
    assert ("use K=3" in told(*runs)) == is_comparable
    document = {"comparisons": [found.as_json()], "prices": None, "tasks": []}
    shown = comparison_rows(document)[1]
    assert shown.count("not comparable") == (0 if is_comparable else 2)  # speed-up and TTFT


def test_of_an_invalid_run_only_what_was_answered_is_told() -> None:
    cells = cells_of(one_run("K=0", 1.0), one_run("K=3", 0.5))
    found = compare_cells(cells, "K=0", prices=None, is_greedy=True)
    assert advice(cells, found, [], {}) and not advice(cells, found, [], {}, is_valid=False)


def test_answers_that_differ_are_counted_and_shown() -> None:
    base, other = one_run("K=0", 1.0), one_run("K=3", 0.5)
    changed = [request(id="q0", text="some", chunks=[(0.1, 2)]), *other.requests[1:]]
    (found,) = compared(base, run(*changed, variant="K=3", concurrency=1))
    assert found.answers is not None
    assert (found.answers.num_compared, found.answers.num_equal) == (8, 7)
    (difference,) = found.answers.differences
    assert (difference.id, difference.position, difference.unit) == ("q0", 1, "character")


def test_answers_of_the_base_are_held_against_its_own_repeats() -> None:
    first, again = one_run("K=0", 1.0), replace(one_run("K=0", 1.0), repeat=1)
    restless = replace(again, requests=(replace(again.requests[0], text="x"), *again.requests[1:]))
    (found,) = compared(first, restless, one_run("K=3", 0.5))
    assert found.own_answers is not None
    assert (found.own_answers.num_compared, found.own_answers.num_equal) == (8, 7)
    (alone,) = compared(first, one_run("K=3", 0.5))
    assert alone.own_answers is None


def test_turns_behind_one_that_differs_are_not_compared() -> None:
    def turns(variant: str, first: str) -> RunRecord:
        texts = (first, "then this")
        parts = [
            request([(0.1, 2)], id=f"c/{turn}", conversation="c", turn=turn, text=text)
            for turn, text in enumerate(texts)
        ]
        return run(*parts, variant=variant, concurrency=1)

    (found,) = compared(turns("K=0", "one"), turns("K=3", "two"))
    assert found.answers is not None
    assert (found.answers.num_compared, found.answers.num_uncompared) == (1, 1)


@pytest.mark.parametrize("turned", [False, True])
def test_an_id_that_ends_as_a_turn_would_is_its_own_conversation(turned: bool) -> None:
    """`HumanEval/0` is a question, not the first turn of `HumanEval`."""

    def answered(variant: str, first: str) -> RunRecord:
        parts = [
            request([(0.1, 2)], id="HumanEval/0", text=first),
            request([(0.1, 2)], id="HumanEval", text="same"),
        ]
        return run(*parts[:: -1 if turned else 1], variant=variant, concurrency=1)

    runs = (answered("K=0", "one"), answered("K=3", "two"))
    (found,) = compared(*runs)
    assert found.answers is not None
    assert (found.answers.num_compared, found.answers.num_equal) == (2, 1)
    records = [VariantRecord(name=one.variant, url="http://x", runs=(one,)) for one in runs]
    ids = {line["question_id"] for line in answer_lines("code", records)}
    assert ids == {"HumanEval/0", "HumanEval"}


def test_token_ids_decide_where_both_have_them() -> None:
    def with_ids(variant: str, ids: tuple[int, ...]) -> RunRecord:
        return run(request([(0.1, 2)], text="x", token_ids=ids), variant=variant, concurrency=1)

    (found,) = compared(with_ids("K=0", (1, 2, 3)), with_ids("K=3", (1, 2, 3, 4)))
    assert found.answers is not None and found.answers.differences[0].position == 3
    assert found.answers.differences[0].unit == "token"


def test_failures_are_named_and_left_out() -> None:
    other = one_run("K=3", 0.5)
    failed = request(id="q0", failure=Failure("busy", "full", 429))
    text = told(one_run("K=0", 1.0), run(failed, *other.requests[1:], variant="K=3", concurrency=1))
    assert "1 of 8 requests failed (1 busy)" in text
