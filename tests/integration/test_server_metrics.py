"""/metrics says what happened: parsed by prometheus_client's own parser, against real engines."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engine_runs import assert_head_is_alive, greedy, make_prompts, soft, start
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.params import SamplingParams
from headstart.server.metrics.exposition import MetricsPage
from headstart.server.metrics.readings import Readings
from headstart.server.metrics.series import Series
from headstart.server.metrics.table import LEARNING, METRICS
from headstart.server.recording import ServerMetrics

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Counted:
    """What a server has for its metrics, without the server."""

    def __init__(self, name: str = "tiny"):
        self.series, self.readings = Series(name), Readings()
        self.metrics = ServerMetrics(self.series)

    def page(self) -> tuple[bytes, str]:
        return MetricsPage(self.series, self.readings).render()


def scrape(counted: Counted) -> Scraped:
    body, content_type = counted.page()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(body.decode())
        for s in family.samples
    }


def value(scraped: Scraped, name: str, **labels: str) -> float:
    """Of the one series with this name and these labels among its own."""
    found = [v for (n, own), v in scraped.items() if n == name and set(labels.items()) <= set(own)]
    assert len(found) == 1, f"{name}{labels}: {len(found)} series"
    return found[0]


def drive(
    engine: Engine, counted: Counted, prompts: Sequence[list[int]], params: SamplingParams,
) -> list[Result]:  # fmt: skip
    """What the server's worker does, without the server; checks that no counter goes down."""
    metrics = counted.metrics
    ids = [engine.add(prompt, params) for prompt in prompts]
    for request_id in ids:
        metrics.request_started(request_id, n=params.n, max_tokens=params.max_tokens)
    before = scrape(counted)
    while engine.has_work:
        started = time.perf_counter()
        updates = engine.step()
        total = sum(len(u.token_ids) for u in updates)
        metrics.observe_step(time.perf_counter() - started, total)
        for update in updates:
            metrics.tokens(update.request_id, update.sample, len(update.token_ids))
        before = assert_nothing_sank(before, scrape(counted))
    results = [engine.collect(request_id) for request_id in ids]
    for result in results:
        metrics.request_finished(result)
    return results


def assert_nothing_sank(before: Scraped, after: Scraped) -> Scraped:
    growing = ("_total", "_bucket", "_count", "_sum")
    for series, number in before.items():
        if series[0].endswith(growing):
            assert after[series] >= number, f"{series} went from {number} to {after[series]}"
    return after


def attached(engine: Engine) -> Counted:
    counted = Counted()
    counted.readings.attach(engine)
    return counted


@pytest.fixture(scope="module")
def told(tiny: Tiny) -> tuple[Engine, list[Result], Scraped]:
    """An engine with drafts after a run of ten prompts, and what its metrics say."""
    engine = start(soft(tiny), speculate=3)
    counted = attached(engine)
    results = drive(engine, counted, make_prompts(8), greedy(24))
    results += drive(engine, counted, make_prompts(2), greedy(24))  # these are cached now
    assert_head_is_alive(results)
    return engine, results, scrape(counted)


def test_speculation_is_counted_as_the_engine_counts_it(
    told: tuple[Engine, list[Result], Scraped],
) -> None:
    engine, results, scraped = told
    acceptance = engine.stats.acceptance
    for prefix in ("headstart", "vllm"):
        assert value(scraped, f"{prefix}:spec_decode_num_drafts_total") == acceptance.drafted[0]
        drafted = value(scraped, f"{prefix}:spec_decode_num_draft_tokens_total")
        accepted = value(scraped, f"{prefix}:spec_decode_num_accepted_tokens_total")
        by_depth = [
            value(
                scraped, f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total", position=str(at)
            )
            for at in range(3)
        ]
        assert by_depth == acceptance.accepted
        assert sum(by_depth) == accepted > 0
        assert drafted == sum(acceptance.drafted) > accepted
        rate = value(scraped, f"{prefix}:spec_decode_draft_acceptance_rate")
        assert rate == pytest.approx(accepted / drafted)
    from_origins = [o for r in results for out in r.outputs for o in out.origins].count("accepted")
    assert accepted == from_origins, "what clients see as accepted is what is counted"
    length = value(scraped, "headstart:spec_decode_acceptance_length")
    assert length == pytest.approx(acceptance.length)


def test_rounds_by_k_add_up_to_all_rounds(told: tuple[Engine, list[Result], Scraped]) -> None:
    scraped = told[2]
    chosen = {
        dict(labels)["drafts"]: count
        for (name, labels), count in scraped.items()
        if name == "headstart:spec_decode_chosen_drafts_total"
    }
    assert chosen["3"] > 0
    assert sum(chosen.values()) == value(scraped, "headstart:decode_rounds_total")
    assert value(scraped, "headstart:spec_decode_reason", reason="fixed") == 1
    assert value(scraped, "headstart:spec_decode_reason", reason="fastest") == 0


def test_tokens_requests_and_prefix_hits_are_counted(
    told: tuple[Engine, list[Result], Scraped],
) -> None:
    _, results, scraped = told
    num_output = sum(len(o.token_ids) for r in results for o in r.outputs)
    assert value(scraped, "vllm:generation_tokens_total") == num_output
    assert value(scraped, "vllm:request_generation_tokens_sum") == num_output
    assert value(scraped, "vllm:prompt_tokens_total") == sum(
        len(r.prompt_token_ids) for r in results
    )
    cached = sum(r.stats.num_cached_tokens for r in results)
    assert value(scraped, "vllm:prefix_cache_hits_total") == cached > 0
    assert value(scraped, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
    ended = value(scraped, "vllm:request_success_total", finished_reason="length")
    assert ended == len(results) == 10
    assert value(scraped, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(scraped, "vllm:num_requests_running") == 0
    assert value(scraped, "vllm:kv_cache_usage_perc") == 0


def test_latencies_of_a_request_add_up(told: tuple[Engine, list[Result], Scraped]) -> None:
    _, results, scraped = told
    parts = [
        value(scraped, f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode")
    ]
    assert sum(parts) == pytest.approx(value(scraped, "vllm:request_inference_time_seconds_sum"))
    assert value(scraped, "vllm:time_to_first_token_seconds_count") == len(results)
    whole = value(scraped, "vllm:e2e_request_latency_seconds_sum")
    queued = value(scraped, "vllm:request_queue_time_seconds_sum")
    assert 0 < sum(parts) <= whole
    assert queued + sum(parts) == pytest.approx(whole, rel=0.05)
    rounds = value(scraped, "headstart:decode_rounds_total")
    assert value(scraped, "vllm:inter_token_latency_seconds_count") == rounds


def test_aliases_have_vllms_buckets_and_ours_are_finer(
    told: tuple[Engine, list[Result], Scraped],
) -> None:
    scraped = told[2]

    def bounds(name: str) -> set[float]:
        return {float(dict(labels)["le"]) for n, labels in scraped if n == f"{name}_bucket"}

    ours, theirs = (bounds(f"{p}:inter_token_latency_seconds") for p in ("headstart", "vllm"))
    assert min(theirs) == 0.01 and max(theirs) == math.inf
    assert theirs < ours and min(ours) == 0.001
    labels = next(own for (n, own) in scraped if n == "vllm:generation_tokens_total")
    assert dict(labels) == {"model_name": "tiny", "engine": "0"}


def test_vllm_bench_sees_drafts_and_nothing_twice(
    told: tuple[Engine, list[Result], Scraped],
) -> None:
    """It adds up lines by parts of their names, so no other `vllm:` name may hold these parts."""
    names = {name for name, _ in told[2] if name.startswith("vllm:spec_decode")}
    assert {n for n in names if "num_draft_tokens" in n} == {
        "vllm:spec_decode_num_draft_tokens_total"
    }
    assert {n for n in names if "num_drafts" in n} == {"vllm:spec_decode_num_drafts_total"}
    assert len({n for n in names if "num_accepted_tokens" in n}) == 2
    assert not any(name.endswith("_created") for name, _ in told[2])


def test_every_row_of_the_table_is_exposed_and_nothing_else(tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate="auto", max_running_requests=4)
    counted = attached(engine)
    drive(engine, counted, make_prompts(6), greedy(12))
    counted.metrics.http_request("/v1/models", "GET", 200, 0.01)
    families = {
        family.name: family.type
        for family in text_string_to_metric_families(counted.page()[0].decode())
        if not family.name.startswith("process_")
    }
    expected = {
        name: metric.kind
        for metric in METRICS.values()
        for name in (metric.own, metric.alias)
        if name is not None and metric not in LEARNING  # these come with --learn
    }
    assert families == expected


def test_auto_says_why_and_what_a_round_costs(tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate="auto", speculate_off_above=3)
    counted = attached(engine)
    drive(engine, counted, make_prompts(3), greedy(12))
    scraped = scrape(counted)
    assert value(scraped, "headstart:spec_decode_reason", reason="fastest") == 1
    assert value(scraped, "headstart:spec_decode_expected_speedup") >= 1
    costs = [
        value(scraped, "headstart:round_cost_seconds", drafts=str(drafts)) for drafts in (0, 8)
    ]
    assert 0 < costs[0] < costs[1]
    for prompt in make_prompts(6):
        engine.add(prompt, greedy(4))
    engine.step()
    engine.step()
    crowded = scrape(counted)
    assert value(crowded, "headstart:spec_decode_reason", reason="off_above") == 1
    assert value(crowded, "vllm:num_requests_running") == 6
    assert 0 < value(crowded, "vllm:kv_cache_usage_perc") < 1


def test_without_a_head_there_are_no_speculative_series(plain: Engine) -> None:
    scraped = scrape(attached(plain))
    assert not any("spec_decode_num" in name for name, _ in scraped)
    assert value(scraped, "headstart:spec_decode_reason", reason="none") == 1


def test_counters_go_on_after_another_engine_takes_over(
    tiny: Tiny, drafting: Engine, plain: Engine
) -> None:
    counted = attached(drafting)
    drive(drafting, counted, make_prompts(4), greedy(12))
    before = scrape(counted)
    counted.readings.attach(start(soft(tiny), speculate=3))
    after = assert_nothing_sank(before, scrape(counted))
    name = "vllm:spec_decode_num_accepted_tokens_total"
    assert value(after, name) == value(before, name) > 0


def test_aborts_and_failures_are_counted_and_their_times_are_not(drafting: Engine) -> None:
    counted = attached(drafting)
    request_id = drafting.add([3, 4, 5], greedy(50, n=2))
    counted.metrics.request_started(request_id, n=2)
    drafting.step()
    drafting.abort(request_id)
    counted.metrics.request_finished(drafting.collect(request_id))
    counted.metrics.request_started("lost", n=3)
    counted.metrics.request_failed("lost")
    scraped = scrape(counted)
    ended = {
        reason: value(scraped, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended == {"stop": 0, "length": 0, "abort": 2, "error": 3}
    assert value(scraped, "vllm:e2e_request_latency_seconds_count") == 0


def test_two_servers_in_one_process_do_not_share_anything(drafting: Engine) -> None:
    one, other = Counted("one"), Counted("other")
    one.metrics.http_request("/health", "GET", 200, 0.01)
    assert not any(name == "http_requests_total" for name, _ in scrape(other))
    assert value(scrape(one), "http_requests_total", handler="/health", status="2xx") == 1


def test_paths_that_clients_make_up_do_not_become_series() -> None:
    counted = Counted()
    for number in range(50):
        counted.metrics.http_request(None, f"METHOD{number}", 404, 0.001)
    found: list[Any] = [own for (name, own) in scrape(counted) if name == "http_requests_total"]
    assert len(found) == 1


def test_states_of_the_server_are_exclusive() -> None:
    counted = Counted()
    assert value(scrape(counted), "headstart:server_state", state="starting") == 1
    counted.readings.state = "draining"
    scraped = scrape(counted)
    assert value(scraped, "headstart:server_state", state="draining") == 1
    assert value(scraped, "headstart:server_state", state="starting") == 0
