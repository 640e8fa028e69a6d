"""Which requests run, with ints only: no model, no tensors."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_steps import request, run, scheduler

from headstart.engine import kv_cache
from headstart.engine.kv_cache import block_digest


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert scheduler().plan() == []


def test_a_prompt_runs_whole_then_token_by_token() -> None:
    own = scheduler()
    own.add(request("a", 5))
    assert run(own, own.plan()) == {"a": (0, 5, 0)}
    assert run(own, own.plan()) == {"a": (5, 1, 0)}


def test_drafts_are_rows_and_accepted_ones_need_no_second_row() -> None:
    own = scheduler()
    own.add(request("a", 4))
    run(own, own.plan(), drafts=3)
    assert run(own, own.plan(), accepted=2, drafts=3) == {"a": (4, 4, 3)}
    assert run(own, own.plan()) == {"a": (7, 4, 3)}


def test_a_long_prompt_is_cut_and_does_not_stop_those_who_generate() -> None:
    own = scheduler(max_batched_tokens=4)
    own.add(request("a", 3))
    run(own, own.plan())
    own.add(request("b", 7, arrival=1))
    assert run(own, own.plan()) == {"a": (3, 1, 0), "b": (0, 3, 0)}
    assert run(own, own.plan()) == {"a": (4, 1, 0), "b": (3, 3, 0)}
    assert run(own, own.plan()) == {"a": (5, 1, 0), "b": (6, 1, 0)}


def test_where_passes_are_large_a_prompt_is_cut_at_the_same_places_as_any_other() -> None:
    """Chunks of prompts that come together would else each have a shape of their own."""
    own = scheduler(num_blocks=8192, max_batched_tokens=4096)
    for arrival, (name, length) in enumerate((("a", 5000), ("b", 5000), ("c", 90))):
        own.add(request(name, length, arrival))
    assert run(own, own.plan()) == {"a": (0, 4096, 0)}
    plan = run(own, own.plan())
    assert plan["a"] == (4096, 904, 0) and plan["b"] == (0, 2048, 0)
    seen = [run(own, own.plan())["b"] for _ in range(2)]
    assert seen == [(2048, 2952, 0), (5000, 1, 0)]


def test_a_prompt_that_would_be_cut_short_leaves_the_rest_of_a_pass() -> None:
    own = scheduler(num_blocks=8192, max_batched_tokens=4096)
    for arrival, (name, length) in enumerate((("a", 3000), ("b", 5000))):
        own.add(request(name, length, arrival))
    assert run(own, own.plan()) == {"a": (0, 3000, 0)}
    assert run(own, own.plan()) == {"a": (3000, 1, 0), "b": (0, 2048, 0)}


def test_a_long_prompt_goes_on_where_less_than_a_part_is_ever_left() -> None:
    """Regression: it got no row as long as drafts of others took half of every pass."""
    own = scheduler(num_blocks=8192, max_batched_tokens=4096)
    own.add(request("a", 1))
    run(own, own.plan(), drafts=2303)
    own.add(request("b", 5000, 1))
    seen = [run(own, own.plan(), drafts=2303)["b"] for _ in range(3)]
    assert seen == [(0, 1792, 0), (1792, 1792, 0), (3584, 1416, 0)]


def test_drafts_yield_to_a_row_for_everybody_who_generates() -> None:
    own = scheduler(max_batched_tokens=4)
    for arrival, name in enumerate("abc"):
        own.add(request(name, 1, arrival))
        run(own, own.plan(), drafts=3)
    assert run(own, own.plan()) == {"a": (3, 2, 1), "b": (2, 1, 0), "c": (1, 1, 0)}


def test_drafts_that_fill_the_budget_do_not_lock_a_prompt_out() -> None:
    """Regression: with all rows taken by drafts no other request ever started."""
    own = scheduler(max_batched_tokens=4)
    own.add(request("a", 1))
    run(own, own.plan(), drafts=3)
    own.add(request("b", 2, 1))
    assert run(own, own.plan(), drafts=3) == {"a": (1, 3, 2), "b": (0, 1, 0)}
    assert run(own, own.plan(), drafts=3) == {"a": (2, 3, 2), "b": (1, 1, 0)}


def test_no_step_has_more_rows_than_allowed() -> None:
    """Regression: requests with a single row left were admitted and run over the limit."""
    own = scheduler(max_batched_tokens=2)
    for arrival, name in enumerate("abcde"):
        own.add(request(name, 1, arrival))
    seen: dict[str, int] = {}
    for _ in range(6):
        plan = own.plan()
        assert 0 < sum(work.count for work in plan) <= 2
        for name in run(own, plan, drafts=3):
            seen[name] = seen.get(name, 0) + 1
    assert seen["a"] == 6, "the most important request runs every time"


def test_without_chunking_a_prompt_waits_until_it_fits_whole() -> None:
    own = scheduler(max_batched_tokens=6, chunked_prefill=False)
    own.add(request("a", 3))
    run(own, own.plan())
    own.add(request("b", 6, arrival=1))
    assert run(own, own.plan()) == {"a": (3, 1, 0)}
    own.remove(own.running[0])
    assert run(own, own.plan()) == {"b": (0, 6, 0)}


def test_without_chunking_a_prompt_over_the_limit_runs_alone() -> None:
    own = scheduler(max_batched_tokens=4, chunked_prefill=False)
    own.add(request("b", 9))
    own.add(request("c", 2, arrival=1))
    assert run(own, own.plan()) == {"b": (0, 9, 0)}


def test_the_number_of_running_requests_is_limited() -> None:
    own = scheduler(max_running_requests=2)
    for arrival, name in enumerate("abc"):
        own.add(request(name, 2, arrival))
    assert set(run(own, own.plan())) == {"a", "b"}
    own.remove(own.running[0])
    assert set(run(own, own.plan())) == {"b", "c"}


def test_a_prompt_that_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a blocked request hashed what it would find, step after step."""
    own = scheduler(8)
    old = request("b", 8)
    own.add(old)
    run(own, own.plan())
    own.remove(old)
    hog = request("a", 4)
    own.add(hog)
    run(own, own.plan())
    own.add(request("b", 14, 1))
    count = 0

    def counted(parent: bytes, tokens: Any) -> bytes:
        nonlocal count
        count += 1
        return block_digest(parent, tokens)

    monkeypatch.setattr(kv_cache, "block_digest", counted)
    for _ in range(3):
        assert {work.request.id for work in own.plan()} == {"a"}
    assert count <= 7


def test_drafts_are_dropped_before_anybody_loses_memory() -> None:
    own = scheduler(5)
    own.add(request("a", 2, 0))
    own.add(request("b", 2, 1))
    run(own, own.plan())
    for running in own.running:
        running.drafts = [9] * 4  # more than there is memory for
    assert run(own, own.plan()) == {"a": (2, 1, 0), "b": (2, 1, 0)}
    assert own.num_preemptions == 0


def test_looking_ahead_takes_free_blocks_and_never_others() -> None:
    own = scheduler(4)
    a, b = request("a", 2, 0), request("b", 2, 1)
    own.add(a)
    own.add(b)
    run(own, own.plan())
    assert own.look_ahead(a, 5) == 1, "its second block has one more slot"
    own.remove(b)
    assert own.look_ahead(a, 5) == 5
    own.check()


def test_a_finished_text_is_found_by_the_next_request_but_for_its_last_token() -> None:
    own = scheduler()
    first = request("a", 6)
    own.add(first)
    run(own, own.plan())
    own.remove(first)
    again = request("a", 6, 1)
    own.add(again)
    assert run(own, own.plan()) == {"a": (4, 2, 0)}
    assert again.num_cached == 4


def test_running_requests_share_blocks_and_keep_them_when_one_leaves() -> None:
    own = scheduler()
    first, again = request("a", 6), request("a", 6, 1)
    own.add(first)
    run(own, own.plan())
    again.id = "a2"
    own.add(again)
    run(own, own.plan())
    assert again.blocks[:2] == first.blocks[:2]
    assert again.blocks[2] != first.blocks[2]
    own.remove(first)
    own.check()


def test_a_hit_that_cannot_start_gives_its_blocks_back() -> None:
    own = scheduler(6)
    old = request("a", 4)
    own.add(old)
    run(own, own.plan())
    own.remove(old)
    hog = request("b", 5, 1)
    own.add(hog)
    run(own, own.plan())
    own.add(request("a", 9, 2))
    assert set(run(own, own.plan())) == {"b"}
    own.check()


def test_a_removed_request_leaves_nothing_behind() -> None:
    own = scheduler()
    waiting, running = request("w", 3, 1), request("r", 3, 0)
    own.add(running)
    run(own, own.plan(), drafts=2)
    own.add(waiting)
    own.remove(waiting)
    own.remove(running)
    assert (own.running, own.waiting, own.pool.num_used) == ([], [], 0)
    own.check()


def test_a_preempted_request_resets_all_but_its_tokens() -> None:
    own = request("a", 3)
    own.tokens.append(5)
    own.blocks, own.num_computed, own.drafts, own.num_registered = [1], 3, [2], 1
    own.reset()
    assert own.output_ids == [5]
    assert (own.blocks, own.num_computed, own.drafts, own.num_registered) == ([], 0, [], 0)
