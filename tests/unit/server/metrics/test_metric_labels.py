"""Clients cannot make the metrics grow, nor keep the event loop busy with them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import get_args

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from headstart.engine.auto.policy import DecidedBy
from headstart.engine.engine import Engine
from headstart.server.app import create_app
from headstart.server.metrics.exposition import MetricsPage
from headstart.server.metrics.readings import Health, Readings
from headstart.server.metrics.series import Series
from headstart.server.metrics.table import METRICS, OTHER, Metric
from headstart.server.options import ServerOptions
from headstart.server.recording import ServerMetrics, bounded
from headstart.server.state import ServerState

SETTINGS = {"block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "version"}


def no_engine() -> Engine:
    raise AssertionError("nothing is loaded in these tests")


@pytest.fixture
def state() -> ServerState:
    return ServerState(
        "small", ServerOptions(port=0, api_key=["secret"]), no_engine, is_public=False
    )


@pytest.fixture
def client(state: ServerState) -> TestClient:
    return TestClient(create_app(state), base_url="http://localhost")


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_every_label_of_every_metric_has_listed_values_or_is_a_setting(metric: Metric) -> None:
    for label in metric.labels:
        if label.name in SETTINGS:
            assert not label.values and metric.kind == "gauge", "one value, read at each scrape"
        else:
            assert label.values and len(set(label.values)) == len(label.values) < 32
            one = replace(metric, labels=(label,))
            for value in label.values:
                assert bounded(one, {label.name: value}) == {label.name: value}
            assert bounded(one, {label.name: "made up by a client"}) == {label.name: OTHER}


def test_the_lists_are_those_of_the_code_that_gives_the_values(client: TestClient) -> None:
    def listed(name: str, label: str) -> set[str]:
        (found,) = (own for own in METRICS[name].labels if own.name == label)
        return set(found.values)

    assert listed("spec_decode_reason", "reason") == {*get_args(DecidedBy), "none"}
    assert listed("server_state", "state") == set(get_args(Health))
    routes = {route.path for route in client.app.routes if isinstance(route, Route)}
    assert listed("http_requests", "handler") == {*routes, "none"}


def test_events_cannot_make_a_series_of_an_unlisted_value() -> None:
    series = Series("small")
    metrics = ServerMetrics(series)
    for number in range(300):
        metrics.http_request(f"/route{number}", f"METHOD{number}", 600 + number, 0.001)
    families = text_string_to_metric_families(MetricsPage(series, Readings()).render()[0].decode())
    (found,) = (family for family in families if family.name == "headstart:http_responses")
    (sample,) = found.samples
    assert sample.value == 300
    assert {sample.labels[name] for name in ("handler", "method", "code")} == {OTHER}


def series(client: TestClient) -> set[str]:
    """Names and labels of everything that is exposed."""
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def test_made_up_methods_and_paths_do_not_make_the_page_grow(client: TestClient) -> None:
    """Regression: every method was a label, and was counted before the key was looked at."""
    paths = ("/v1/chat/completions", "/v1/models/x", "/health", "/metrics", "/none")

    def ask(number: int) -> None:
        for path in paths:
            client.request(f"METHOD{number}", path)
            client.request("get", f"{path}/{number}")
            client.get(f"{path}/{number}")

    ask(0)
    series(client)  # this one is counted, too
    before = series(client)
    for number in range(1, 12):
        ask(number)
    assert series(client) == before
    made_up = [line for line in before if "METHOD" in line or "/0" in line]
    assert not made_up


def test_pages_are_rendered_one_at_a_time_and_beside_the_event_loop(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, threads = threading.Lock(), list[str]()

    def render() -> tuple[bytes, str]:
        assert lock.acquire(blocking=False), "two at once"
        threads.append(threading.current_thread().name)
        time.sleep(0.2)
        lock.release()
        return str(len(threads)).encode(), "text/plain"

    async def scrape() -> tuple[list[tuple[bytes, str]], int]:
        turns, tasks = 0, [asyncio.create_task(state.rendered_metrics())]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(state.rendered_metrics()) for _ in range(100)]
        while not all(task.done() for task in tasks):
            turns += 1
            await asyncio.sleep(0.005)
        return [task.result() for task in tasks], turns

    monkeypatch.setattr(state.metrics_page, "render", render)
    pages, turns = asyncio.run(scrape())
    assert [page[0] for page in pages] == [b"1"] + [b"2"] * 100, "fresh for whoever came later"
    assert turns > 5 and all(name.startswith("metrics") for name in threads)


def test_a_client_that_goes_away_takes_nobody_elses_page(state: ServerState) -> None:
    async def scrape() -> bytes:
        first, second = (asyncio.create_task(state.rendered_metrics()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return (await second)[0]

    assert b"headstart:server_state" in asyncio.run(scrape())
