"""Every figure on records whose truth can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from support.bench_records import request, run

from headstart.bench.measures import (
    Limits,
    chunk_gaps_seconds,
    latency_seconds,
    measure,
    parse_limits,
    quantile,
    spread,
    token_gaps_seconds,
    tpot_seconds,
    ttft_seconds,
)
from headstart.bench.records import Failure
from headstart.errors import ConfigError

# Sent at 1; one token at 1.5, three at 1.8, two at 2.0.
ANSWER = request([(1.5, 1), (1.8, 3), (2.0, 2)], sent=1.0, prompt_tokens=10)


def test_latencies_of_a_stream_with_several_tokens_in_a_chunk() -> None:
    assert ttft_seconds(ANSWER) == pytest.approx(0.5)
    assert tpot_seconds(ANSWER) == pytest.approx(0.5 / 5)
    assert latency_seconds(ANSWER) == pytest.approx(1.0)
    assert chunk_gaps_seconds(ANSWER) == pytest.approx([0.3, 0.2])
    assert token_gaps_seconds(ANSWER) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    one = request([(0.5, 1)])
    assert tpot_seconds(one) is None and ttft_seconds(one) == 0.5
    assert measure(run(one)).tpot_seconds is None


def test_throughput_counts_answers_only_and_failures_by_kind() -> None:
    cut = request([(0.5, 50)], failure=Failure("cut", "x"), end_seconds=2.0)
    found = measure(run(ANSWER, cut))
    assert (found.num_requests, found.num_answered, found.failures) == (2, 1, {"cut": 1})
    assert found.output_tokens_per_second == pytest.approx(6 / 2)
    assert found.total_tokens_per_second == pytest.approx(16 / 2)
    assert found.tokens_per_chunk == 2.5
    assert found.mean_concurrency == pytest.approx((1 + 2) / 2)
    assert found.ttft_seconds is not None and found.ttft_seconds.count == 1


def test_total_throughput_is_unknown_where_a_prompt_is() -> None:
    assert measure(run(ANSWER, request([(1.0, 1)]))).total_tokens_per_second is None


def test_goodput_counts_requests_within_all_limits() -> None:
    slow = request([(1.9, 1), (2.0, 1)], sent=0.0)
    failed = request(failure=Failure("busy", "x"))
    found = measure(run(ANSWER, slow, failed), parse_limits("ttft:600,tpot:150"))
    assert found.good_requests_per_second == pytest.approx(1 / 2)
    assert found.good_output_tokens_per_second == pytest.approx(6 / 2)
    assert measure(run(ANSWER)).good_requests_per_second is None


def test_a_limit_is_met_at_its_value() -> None:
    assert Limits(ttft_seconds=0.5).are_met_by(ANSWER)
    assert not Limits(ttft_seconds=0.49).are_met_by(ANSWER)
    assert not Limits(latency_seconds=0.99).are_met_by(ANSWER)


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "itl:5", "ttft:0", "ttft:1,ttft:2"])
def test_limits_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft:200"):
        parse_limits(text)


def test_quantiles_are_numpys() -> None:
    values = sorted(np.random.default_rng(0).exponential(size=37).tolist())
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))
    found = spread([*values, None])
    assert found is not None and found.std == pytest.approx(float(np.std(values)))


def test_a_run_without_answers_has_no_spreads() -> None:
    found = measure(run(request(failure=Failure("timeout", "x"))))
    assert found.ttft_seconds is None and found.output_tokens_per_second == 0
