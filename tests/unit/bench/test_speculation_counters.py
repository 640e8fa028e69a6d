"""Counters of all engines, from /metrics and from answers, in one form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.metrics_scrape import read_counters, speculation_between, went_back
from headstart.bench.records import Speculation
from headstart.bench.response_counters import speculation_of_response, total_speculation
from headstart.sampling.acceptance import Acceptance

EMPTY = read_counters("")


def vllm(rounds: int, drafted: int, accepted: list[int], prefix: str = "vllm:") -> str:
    label = 'model_name="m"'
    lines = [
        f"# TYPE {prefix}spec_decode_num_drafts counter",
        f"{prefix}spec_decode_num_drafts_total{{{label}}} {float(rounds)}",
        f"{prefix}spec_decode_num_draft_tokens_total{{{label}}} {float(drafted)}",
        f"{prefix}spec_decode_num_accepted_tokens_total{{{label}}} {float(sum(accepted))}",
        f"{prefix}spec_decode_num_drafts_created{{{label}}} 1.7e9",
    ]
    per = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{per}{{{label},position="{i}"}} {float(n)}' for i, n in enumerate(accepted)]
    return "\n".join(lines)


@pytest.mark.parametrize(("engine", "prefix"), [("vllm", "vllm:"), ("llamacpp", "llamacpp:")])
def test_only_what_was_counted_in_between_is_taken(engine: str, prefix: str) -> None:
    before = read_counters(vllm(100, 300, [90, 80, 70], prefix))
    after = read_counters(vllm(200, 600, [170, 130, 90], prefix))
    found = speculation_between(before, after)
    assert found is not None and (found.source, found.rounds) == (engine, 100)
    assert found.accepted_per_depth == (80, 50, 20)
    assert found.acceptance_length == pytest.approx(1 + 150 / 100)
    assert found.draft_acceptance_rate == pytest.approx(150 / 300)
    assert found.cumulative == pytest.approx((0.8, 0.5, 0.2))
    assert found.conditional == pytest.approx((0.8, 0.625, 0.4))


def test_a_depth_where_nothing_was_accepted_is_a_depth() -> None:
    found = speculation_between(EMPTY, read_counters(vllm(100, 300, [80, 50, 0])))
    assert found is not None and found.conditional == pytest.approx((0.8, 0.625, 0.0))


def test_our_own_names_come_before_the_aliases_and_know_plain_rounds() -> None:
    own = vllm(10, 20, [8, 4], "headstart:") + "\nheadstart:decode_rounds_total 16\n"
    per = "headstart:spec_decode_num_draft_tokens_per_pos_total"
    own += f'{per}{{position="0"}} 10\n{per}{{position="1"}} 8\n'
    found = speculation_between(EMPTY, read_counters(vllm(10, 20, [8, 4]) + "\n" + own))
    assert found is not None and (found.source, found.rounds) == ("headstart", 16)
    assert found.cumulative == pytest.approx((0.8, 0.5))
    assert found.acceptance_length == pytest.approx(1 + 12 / 16)


def test_copied_drafts_are_told_apart() -> None:
    by_source = "headstart:spec_decode_num_accepted_tokens_by_source_total"
    own = vllm(10, 20, [8, 4], "headstart:") + "\nheadstart:decode_rounds_total 16\n"
    own += f'{by_source}{{source="head"}} 9\n{by_source}{{source="context"}} 3\n'
    found = speculation_between(EMPTY, read_counters(own))
    assert found is not None and found.copied_tokens == 3 and found.copied_share == 0.25
    part = {"draft_tokens": 20, "accepted_tokens": 12, "copied_accepted_tokens": 3, "rounds": 16}
    told = speculation_of_response({"headstart": {"statistics": part}})
    both = total_speculation([told, told])
    assert both is not None and both.copied_tokens == 6 and both.copied_share == 0.25
    of_vllm = speculation_between(EMPTY, read_counters(vllm(10, 20, [8, 4])))
    assert of_vllm is not None and of_vllm.copied_share is None


def test_sglang_gives_a_length_but_no_rates() -> None:
    text = "sglang:spec_verify_calls_total 50\nsglang:generation_tokens_total 120\n"
    found = speculation_between(EMPTY, read_counters(text))
    assert found is not None and found.acceptance_length == pytest.approx(2.4)
    assert found.draft_acceptance_rate is None and found.cumulative == ()


def test_a_server_without_counters_gives_none() -> None:
    text = "vllm:num_requests_running 3\nnot a sample\nx NaN\n"
    assert speculation_between(EMPTY, read_counters(text)) is None


def test_several_engines_of_one_server_are_added_up() -> None:
    text = 'a{engine="0"} 2\na{engine="1"} 3\na{engine="2"} NaN\n'
    assert read_counters(text).sums == {"a": 5.0}


def test_counters_that_went_back_are_noticed() -> None:
    old, new = read_counters(vllm(100, 300, [90])), read_counters(vllm(5, 15, [4]))
    assert went_back(old, new) and not went_back(new, old)


RESPONSES: dict[str, dict[str, Any]] = {
    "ours": {
        "headstart": {
            "statistics": {
                "rounds": 10, "draft_tokens": 18, "accepted_tokens": 12,
                "draft_tokens_per_depth": [10, 8], "accepted_per_depth": [8, 4],
                "tried_per_depth": [10, 6],
            }
        }
    },
    "vllm": {
        "metrics": {
            "speculative_decoding": {
                "num_spec_steps": 10, "num_draft_tokens": 18, "num_accepted_draft_tokens": 12,
                "acceptance_histogram": [2, 4, 4],
            }
        }
    },
    "sglang": {
        "sglext": {
            "spec_tokens_details": {
                "spec_verify_ct": 10, "spec_num_proposed_drafts": 18, "spec_num_correct_drafts": 12,
                "spec_correct_drafts_histogram": [2, 4, 4],
            }
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("engine", RESPONSES)
def test_answers_of_all_engines_read_the_same(engine: str) -> None:
    found = speculation_of_response({"choices": [], **RESPONSES[engine]})
    assert found is not None and found.accepted_per_depth == (8, 4)
    assert found.acceptance_length == pytest.approx(2.2)
    assert found.draft_acceptance_rate == pytest.approx(12 / 18)
    assert found.cumulative[0] == found.conditional[0] == pytest.approx(0.8)
    # 18 drafts are not 2 in each of 10 rounds: the second rate is known where tries are counted.
    assert found.conditional[1] == (pytest.approx(4 / 6) if engine == "ours" else None)


def test_an_answer_without_an_accepted_draft_hides_nothing_of_the_others() -> None:
    """SGLang's histogram grows as far as drafts were accepted."""
    details = RESPONSES["sglang"]["sglext"]["spec_tokens_details"]
    none = {**details, "spec_num_correct_drafts": 0, "spec_correct_drafts_histogram": [10]}
    answers = [RESPONSES["sglang"], {"sglext": {"spec_tokens_details": none}}]
    both = total_speculation(map(speculation_of_response, answers))
    assert both is not None and both.accepted_per_depth == (8, 4)
    without = {k: v for k, v in details.items() if "histogram" not in k}
    answers.append({"sglext": {"spec_tokens_details": without}})
    all_three = total_speculation(map(speculation_of_response, answers))
    assert all_three is not None and all_three.accepted_per_depth == ()


def test_llama_cpp_counts_drafts_but_no_rounds() -> None:
    assert speculation_of_response({"timings": {"predicted_n": 9}}) is None
    found = speculation_of_response({"timings": {"draft_n": 9, "draft_n_accepted": 6}})
    assert found is not None and found.acceptance_length is None
    assert found.draft_acceptance_rate == pytest.approx(2 / 3)


def test_a_total_needs_all_its_parts() -> None:
    shallow = Speculation(source="responses", rounds=3, accepted_per_depth=(2,))
    deep = Speculation(source="responses", rounds=4, accepted_per_depth=(3, 1))
    both = total_speculation([shallow, deep])
    assert both is not None and (both.rounds, both.accepted_per_depth) == (7, (5, 1))
    assert total_speculation([shallow, None]) is None and total_speculation([]) is None


def counted(*rounds: tuple[int, int], knows_tried: bool = True) -> Speculation:
    """Of rounds of (drafted, accepted), as our server counts them."""
    found = Acceptance()
    for drafted, accepted in rounds:
        found.observe(drafted, accepted)
    return Speculation(
        source="headstart", rounds=found.rounds, has_plain_rounds=True,
        draft_tokens=sum(found.drafted), accepted_tokens=sum(found.accepted),
        drafted_per_depth=tuple(found.drafted), accepted_per_depth=tuple(found.accepted),
        tried_per_depth=tuple(found.tried) if knows_tried else (),
    )  # fmt: skip


# Drafted deep where it goes well, and only once where it does not, as `auto` does.
VARYING = [(3, 3)] * 8 + [(3, 1)] * 2 + [(1, 0)] * 10 + [(0, 0)] * 5


def test_conditional_rates_are_right_where_rounds_draft_differently_many() -> None:
    found = counted(*VARYING)
    assert found.cumulative == pytest.approx((10 / 20, 8 / 10, 8 / 10))
    # Their ratio, 0.8 / 0.5, would be no rate at all.
    assert found.conditional == pytest.approx((10 / 20, 8 / 10, 8 / 8))
    both = total_speculation([found, counted(*VARYING), counted((0, 0))])
    assert both is not None and both.conditional == found.conditional


def test_conditional_rates_that_nobody_counted_are_not_known() -> None:
    found = counted(*VARYING, knows_tried=False)
    assert found.conditional == (pytest.approx(0.5), None, 1.0)  # the last two: drafted alike
    fixed = counted((3, 3), (3, 1), (3, 0), (0, 0), knows_tried=False)
    assert fixed.conditional == pytest.approx((2 / 3, 1 / 2, 1.0))
    mixed = total_speculation([counted((3, 3)), counted((1, 0), knows_tried=False)])
    assert mixed is not None and mixed.conditional == (0.5, None, 1.0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_rates_are_rates(rounds: list[tuple[int, int]]) -> None:
    possible = [(drafted, min(drafted, accepted)) for drafted, accepted in rounds]
    for knows_tried in (True, False):
        found = counted(*possible, knows_tried=knows_tried)
        assert all(0 <= rate <= 1 for rate in (*found.cumulative, *found.conditional) if rate)
