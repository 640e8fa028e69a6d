"""What counters of each engine say about depth 1, and which verdict follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.bench.metrics_scrape import EMPTY, engine_of, read_counters, speculation_between
from headstart.bench.records import Speculation
from headstart.doctor.evidence import Evidence, evidence_of, of_chunks, wilson
from headstart.doctor.verdict import Promise, found_promise, judge, promise_of
from headstart.errors import DataError

PROMISE = Promise(source="score.json", rate=0.66, low=0.6, lengths=(1.0, 1.66, 2.05, 2.3))


def exact(accepted: int, rounds: int) -> Evidence:
    found = evidence_of(
        Speculation(source="vllm", rounds=rounds, accepted_per_depth=(accepted,)), "vLLM's /metrics"
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("accepted", "rounds", "promise", "verdict"),
    [
        (0, 59, None, "few"),
        (2, 60, None, "dead"),
        (3, 60, None, "low"),
        (19, 100, None, "low"),
        (20, 100, None, "healthy"),
        (4, 100, PROMISE, "dead"),
        (40, 100, PROMISE, "below"),
        (40, 100, None, "healthy"),
        (50, 100, PROMISE, "healthy"),  # the interval reaches to what was promised
        (500, 1000, PROMISE, "below"),
        (560, 1000, PROMISE, "healthy"),
    ],
)
def test_a_verdict_by_rate_rounds_and_promise(
    accepted: int, rounds: int, promise: Promise | None, verdict: str
) -> None:
    found = judge(exact(accepted, rounds), promise, 3)
    assert found.verdict == verdict, found.said
    assert ("promised" in found.said) == (promise is not None and verdict != "dead")


def test_depth_1_is_counted_over_rounds_that_drafted() -> None:
    """Headstart counts rounds without drafts, too."""
    own = Speculation(
        source="headstart", rounds=1000, has_plain_rounds=True, accepted_tokens=90,
        drafted_per_depth=(100, 50), accepted_per_depth=(60, 30),
    )  # fmt: skip
    found = evidence_of(own, "x")
    assert found is not None and found.is_exact
    assert (found.low, found.rounds, found.by_depth) == (0.6, 100, (0.6, 0.6))
    plain = Speculation(source="headstart", rounds=70, has_plain_rounds=True, draft_tokens=0)
    assert evidence_of(plain, "x") is None


def test_sglang_tells_rounds_and_tokens_which_bound_depth_1() -> None:
    text = (
        'sglang:spec_verify_calls_total{model_name="x"} 200\n'
        'sglang:generation_tokens_total{model_name="x"} 310\n'
    )
    counters = read_counters(text)
    assert engine_of(counters) == "sglang" and engine_of(EMPTY) is None
    found = speculation_between(EMPTY, counters)
    assert found is not None
    three = evidence_of(found, "x", num_drafts=3, num_requests=10)  # first tokens are of no round
    assert three is not None and not three.is_exact
    assert (three.per_round, three.high) == (0.5, 0.5) and three.low == pytest.approx(0.5 / 3)
    one = evidence_of(found, "x", num_drafts=1, num_requests=10)
    assert one is not None and one.is_exact and one.low == 0.5
    missed = judge(three, PROMISE, 3)
    assert missed.verdict == "below" and "0.50 drafts a round" in missed.said
    assert judge(three, None, 3).verdict == "healthy"
    dead = evidence_of(found, "x", num_drafts=3, num_requests=102)
    assert dead is not None and judge(dead, None, 3).verdict == "dead"


def test_tensorrt_llm_tells_drafts_alone() -> None:
    own = Speculation(source="trtllm", draft_tokens=900, accepted_tokens=300)
    known = evidence_of(own, "x", num_drafts=3)
    assert known is not None and (known.rounds, known.high) == (300, 1.0)
    assert known.low == pytest.approx(1 / 3)
    unknown = evidence_of(own, "x")
    assert unknown is not None and unknown.high == 1.0 and unknown.per_round is None
    dead = evidence_of(
        Speculation(source="trtllm", draft_tokens=900, accepted_tokens=9), "x", num_drafts=3
    )
    assert dead is not None and judge(dead, None, 3).verdict == "dead"
    assert evidence_of(Speculation(source="trtllm", draft_tokens=0, accepted_tokens=0), "x") is None


def test_chunks_of_several_tokens_are_rounds_that_accepted() -> None:
    found = of_chunks([[1, 1, 2, 4], [1, 3, 1]], "chunks")
    assert found is not None and found.rounds == 5
    assert found.by_depth == (0.6, 0.4, 0.2) and found.per_round == pytest.approx(1.2)
    assert of_chunks([[1, 1, 1], []], "chunks") is None, "nothing is drafted, or all is refused"


def test_the_interval_of_a_share_is_wilson_s() -> None:
    low, high = wilson(0.5, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert wilson(0.0, 60)[0] == 0 and wilson(0.0, 60)[1] < 0.07
    assert wilson(0.3, 0) == (0.0, 1.0)


def report(rate: float, interval: list[list[float]] | None) -> dict[str, Any]:
    walked = {
        "cumulative_acceptance": [rate, rate / 2], "cumulative_acceptance_interval": interval,
        "acceptance_length": [1.0, 1 + rate, 1 + 1.5 * rate],
    }  # fmt: skip
    return {"vocabulary": "whole vocabulary", "overall": {"walked": walked}}


def test_a_promise_is_the_least_of_a_score_s_vocabularies(tmp_path: Path) -> None:
    file = tmp_path / "score.json"
    results = [report(0.7, [[0.6, 0.8], [0.2, 0.4]]), report(0.5, None)]
    file.write_text(json.dumps({"results": results}))
    found = found_promise(None, tmp_path)
    assert found == Promise(source="score.json", rate=0.5, low=0.5, lengths=(1.0, 1.5, 1.75))
    file.write_text(json.dumps({"results": results[:1]}))
    assert promise_of(file).low == 0.6
    row = {"cumulative_acceptance": [0.4], "acceptance_length": [1, 1.4]}
    formula = {"rejection": {"row_average": row}, "shared_noise": {}}
    written = {"formula": "rejection", "results": [{"overall": {"formula": formula}}]}
    file.write_text(json.dumps(written))
    assert promise_of(file).rate == 0.4
    for wrong in ({}, {"results": []}, {"results": [{"overall": {}}]}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match="is no report of `headstart score --json`"):
            promise_of(file)
    assert found_promise(tmp_path / "none") is None
