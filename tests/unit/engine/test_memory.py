"""How many blocks and states there is memory for, by numbers alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headstart.backends.base import Backend
from headstart.engine.memory import Memory, MemoryNeeds, plan_memory, round_sizes
from headstart.engine.options import EngineOptions
from headstart.errors import EngineError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CPU = MemoryNeeds(
    block_bytes=16 * KIB, state_bytes=0, round_bytes=0, prompt_bytes=0, free_bytes=64 * GIB,
    max_len=4095, is_cpu=True, has_head=True, has_rounds=False,
)  # fmt: skip
GPU = replace(CPU, is_cpu=False, has_rounds=True)
RECURRENT = replace(GPU, state_bytes=MIB, round_bytes=2 * MIB)
FULL = 256  # blocks of 16 tokens for a request of full length


def options(**settings: Any) -> EngineOptions:
    return EngineOptions(**{"block_size": 16, "max_running_requests": 4, **settings})


def blocks(needs: MemoryNeeds, **settings: Any) -> int:
    return plan_memory(needs, options(**settings)).cache.num_blocks


def test_a_cpu_has_enough_for_requests_of_usual_length() -> None:
    """2048 tokens each, where the model takes more."""
    assert blocks(CPU) == 4 * 2048 // 16
    assert blocks(CPU, max_running_requests=1) == FULL, "one request of full length at least"


def test_a_cpu_takes_a_gibibyte_at_most_unless_one_request_needs_more() -> None:
    assert blocks(replace(CPU, block_bytes=4 * MIB)) == FULL
    assert blocks(replace(CPU, block_bytes=MIB), max_running_requests=64) == GIB // MIB


def test_a_cpu_leaves_a_fifth_of_what_is_free() -> None:
    assert blocks(replace(CPU, free_bytes=100 * CPU.block_bytes)) == 80


def test_short_models_have_no_more_blocks_than_their_requests_can_hold() -> None:
    """A request keeps a slot for the token that its last row gives."""
    assert blocks(replace(CPU, max_len=15)) == 4
    assert blocks(replace(CPU, max_len=16)) == 8


def test_memory_as_told() -> None:
    assert blocks(CPU, kv_bytes=10 * CPU.block_bytes + 1) == 10
    assert blocks(GPU, kv_bytes=10 * GPU.block_bytes + 1) == 10
    assert blocks(CPU, kv_bytes=1 << 50) == 4 * FULL, "more would be of no use"


def test_a_fraction_is_of_what_is_free_beside_a_long_prompt() -> None:
    needs = replace(GPU, free_bytes=400 * GPU.block_bytes, prompt_bytes=100 * GPU.block_bytes)
    assert blocks(needs) == 150, "half of it on a GPU"
    assert blocks(needs, memory_fraction=0.25) == 75
    assert blocks(replace(needs, is_cpu=True), memory_fraction=0.25) == 75
    with pytest.raises(EngineError, match="one K/V block needs 16,384 bytes and there are 0"):
        blocks(replace(needs, prompt_bytes=GIB))


def test_blocks_that_hold_nothing_are_as_many_as_requests_need() -> None:
    """A trunk of recurrent layers alone has no K/V; its blocks are mere numbers."""
    needs = replace(RECURRENT, block_bytes=0, has_head=False)
    assert blocks(needs) == 4 * FULL


def planned(needs: MemoryNeeds, **settings: Any) -> Memory:
    return plan_memory(needs, options(**settings))


@pytest.mark.parametrize(
    ("needs", "speculate", "most"),
    [
        (RECURRENT, 3, 8 + 3), (RECURRENT, 0, 8), (RECURRENT, "auto", 8 + 4),
        (replace(RECURRENT, has_rounds=False), 3, 8 + 12),
        (replace(RECURRENT, has_head=False), 3, 8),
    ],
    ids=["rounds", "no drafts", "auto", "no rounds", "no head"],
)  # fmt: skip
def test_there_are_states_for_requests_prefixes_and_drafts_that_the_host_decides(
    needs: MemoryNeeds, speculate: int | str, most: int
) -> None:
    assert planned(needs, speculate=speculate).cache.num_states == most


def test_states_take_half_at_most_of_what_rounds_leave() -> None:
    plan = planned(RECURRENT, kv_bytes=12 * MIB)
    assert plan.cache.num_states == 5, "half of 10 MiB"
    assert plan.cache.num_blocks == (12 - 2 - 5) * MIB // (16 * KIB)


def test_states_of_a_cpu_go_by_what_is_free() -> None:
    needs = replace(RECURRENT, is_cpu=True, has_rounds=False, round_bytes=0, free_bytes=10 * MIB)
    plan = planned(needs)
    assert plan.cache.num_states == 4, "half of four fifths"
    assert plan.cache.num_blocks == int(6 * MIB * 0.8) // (16 * KIB)
    large = replace(needs, state_bytes=GIB, free_bytes=64 * GIB)
    assert planned(large).cache.num_states == 2, "a request and a snapshot, however large"


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(EngineError, match="one K/V block needs 16,384 bytes and there are 9,000"):
        planned(CPU, kv_bytes=9000)
    with pytest.raises(EngineError, match=r"newest rows of 4 requests need 2,097,152 bytes and"):
        planned(RECURRENT, kv_bytes=2 * MIB)
    with pytest.raises(EngineError, match="state of one request needs 1,048,576 bytes and there"):
        planned(RECURRENT, kv_bytes=3 * MIB)


def test_notes_tell_what_was_taken() -> None:
    assert planned(CPU, kv_bytes=100 * CPU.block_bytes).notes == [
        "100 K/V blocks of 16 tokens (2 MB)"
    ]
    assert planned(RECURRENT, kv_bytes=12 * MIB).notes[1:] == [
        "5 recurrent states of 1.0 MB", "2 MB for the newest rows of requests in rounds",
    ]  # fmt: skip


def test_rounds_without_a_head_have_no_menu_of_drafts() -> None:
    """Regression: with auto and no head a start captured a round with one draft, and failed."""
    config = SimpleNamespace(delta=None)
    bare = cast(Backend, SimpleNamespace(head=None, config=config))
    with_head = cast(Backend, SimpleNamespace(head=object(), config=config))
    auto = options(speculate="auto")
    assert round_sizes(bare, auto).menu == () and round_sizes(bare, auto).max_drafts == 0
    assert round_sizes(with_head, auto).menu[-1] == auto.max_drafts
