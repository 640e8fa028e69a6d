"""Requests that begin together with the same text: one reads it, the others find it cached."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_steps import request, run, scheduler

from headstart.engine.request import Request
from headstart.engine.scheduler import Scheduler

LONG = 400


def beginning(name: str, shared: int, own: int, arrival: int = 0) -> Request:
    """`shared` tokens that all have, then its own."""
    found = request(name, own, arrival)
    found.prompt_ids = [*range(shared), *found.prompt_ids]
    found.tokens = list(found.prompt_ids)
    return found


def made(**options: Any) -> Scheduler:
    return scheduler(2000, max_batched_tokens=4096, **options)


def test_what_another_request_reads_is_waited_for_and_found() -> None:
    own = made()
    for arrival, name in enumerate("abc"):
        own.add(beginning(name, LONG, 20, arrival))
    own.add(request("d", 30, 3))  # shares nothing
    assert run(own, own.plan()) == {"a": (0, LONG + 20, 0), "d": (0, 30, 0)}
    found = run(own, own.plan())
    assert found["b"] == found["c"] == (LONG, 20, 0)


@pytest.mark.parametrize(
    ("shared", "first", "second"),
    [(200, 10, 10), (LONG, 10, LONG + 10), (LONG, LONG + 10, 10)],
    ids=["a short prefix", "mostly text of its own", "the other has much more to read"],
)
def test_it_is_not_waited_for_where_little_is_saved(shared: int, first: int, second: int) -> None:
    own = made()
    own.add(beginning("a", shared, first))
    own.add(beginning("b", shared, second, 1))
    assert set(run(own, own.plan())) == {"a", "b"}


def test_without_a_cache_nothing_is_waited_for() -> None:
    own = made(prefix_caching=False)
    own.pool.is_caching = False
    own.add(beginning("a", LONG, 10))
    own.add(beginning("b", LONG, 10, 1))
    assert set(run(own, own.plan())) == {"a", "b"}


def test_texts_of_another_salt_are_not_waited_for() -> None:
    own = made()
    salted = beginning("b", LONG, 10, 1)
    salted.cache_root = b"salt"
    own.add(beginning("a", LONG, 10))
    own.add(salted)
    assert set(run(own, own.plan())) == {"a", "b"}


def test_a_request_that_leaves_is_not_waited_for_any_longer() -> None:
    own = made()
    first = beginning("a", LONG, 10)
    own.add(first)
    own.add(beginning("b", LONG, 10, 1))
    own.plan()  # a step that failed
    own.remove(first)
    assert run(own, own.plan()) == {"b": (0, LONG + 10, 0)}


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [([1, 2, 3, 4, 5], [1, 2, 3, 9, 5], 2), ([1, 2], [1, 2, 3, 4], 2), ([1], [2], 0), ([], [1], 0)],
)
def test_whole_blocks_are_shared(first: list[int], second: list[int], shared: int) -> None:
    assert made().pool.num_shared(first, second) == shared
    assert made().pool.num_shared(second, first) == shared


def test_a_request_that_waits_for_a_reader_keeps_its_place() -> None:
    """A later request would take it for a whole answer."""
    own = made(max_running_requests=2)
    own.add(beginning("a", LONG, 20))
    own.add(beginning("b", LONG, 20, 1))
    own.add(request("c", 30, 2))
    assert set(run(own, own.plan())) == {"a"}
    assert run(own, own.plan())["b"] == (LONG, 20, 0)


def test_a_less_important_reader_is_not_waited_for() -> None:
    own = made()
    first = beginning("a", LONG, 20)
    first.priority = 5
    own.add(first)
    assert set(own.plan()[0].request.id) == {"a"}
    own.add(beginning("b", LONG, 20, 1))
    assert "b" in {work.request.id for work in own.plan()}


def test_texts_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked = scheduler(2000, max_batched_tokens=64), []
    num_shared = own.pool.num_shared
    monkeypatch.setattr(
        own.pool, "num_shared", lambda *texts: asked.append(1) or num_shared(*texts)
    )
    own.add(beginning("a", LONG, 20))
    own.add(beginning("b", LONG, 20, 1))
    for _ in range(4):
        assert set(run(own, own.plan())) == {"a"}
    assert len(asked) == 1 and own._blocks._shared == {"b": {"a": LONG}}
    own.remove(own.waiting[0])
    assert not own._blocks._shared
