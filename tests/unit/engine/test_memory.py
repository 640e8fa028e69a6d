"""How many blocks and states there is memory for, by numbers alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headstart.backends.base import Backend, DeviceBytes, WorkingBytes
from headstart.engine.memory import (
    MOST_REQUESTS,
    Memory,
    MemoryNeeds,
    enough_bytes,
    plan_memory,
    resolved_requests,
    round_sizes,
)
from headstart.engine.options import EngineOptions
from headstart.errors import EngineError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CPU = MemoryNeeds(
    block_bytes=16 * KIB, state_bytes=0, round_bytes=0, working=WorkingBytes(),
    device=DeviceBytes(64 * GIB, 64 * GIB), max_len=4095, is_cpu=True, has_head=True,
    has_rounds=False,
)  # fmt: skip
GPU = replace(
    CPU, is_cpu=False, has_rounds=True, working=WorkingBytes(2 * GIB, 32 * MIB),
    device=DeviceBytes(60 * GIB, 80 * GIB),
)  # fmt: skip
RECURRENT = replace(GPU, state_bytes=MIB, round_bytes=MIB // 2)
FULL = 256  # blocks of 16 tokens for a request of full length


def options(**settings: Any) -> EngineOptions:
    return EngineOptions(**{"block_size": 16, "max_running_requests": 4, **settings})


def blocks(needs: MemoryNeeds, **settings: Any) -> int:
    return plan_memory(needs, options(**settings)).cache.num_blocks


def with_free(needs: MemoryNeeds, free: int) -> MemoryNeeds:
    return replace(needs, device=replace(needs.device, free=free))


def test_a_cpu_has_enough_for_requests_of_usual_length() -> None:
    """2048 tokens each, where the model takes more."""
    assert blocks(CPU) == 4 * 2048 // 16
    assert blocks(CPU, max_running_requests=1) == FULL, "one request of full length at least"


def test_a_cpu_takes_a_gibibyte_at_most_unless_one_request_needs_more() -> None:
    assert blocks(replace(CPU, block_bytes=4 * MIB)) == FULL
    assert blocks(replace(CPU, block_bytes=MIB), max_running_requests=64) == GIB // MIB


def test_a_cpu_leaves_a_fifth_of_what_is_free() -> None:
    assert blocks(with_free(CPU, 100 * CPU.block_bytes)) == 80


def test_short_models_have_no_more_blocks_than_their_requests_can_hold() -> None:
    """A request keeps a slot for the token that its last row gives."""
    assert blocks(replace(CPU, max_len=15)) == 4
    assert blocks(replace(CPU, max_len=16)) == 8


def test_memory_as_told() -> None:
    assert blocks(CPU, kv_bytes=10 * CPU.block_bytes + 1) == 10
    assert blocks(GPU, kv_bytes=10 * GPU.block_bytes + 1) == 10
    assert blocks(CPU, kv_bytes=1 << 50) == 4 * FULL, "more would be of no use"


def test_a_fraction_of_a_cpu_is_of_what_is_free() -> None:
    assert blocks(with_free(CPU, 400 * CPU.block_bytes), memory_fraction=0.25) == 100


def test_a_fraction_of_a_gpu_is_of_all_its_memory_for_everything() -> None:
    """Of 80 GiB 20 are in use; computing will take 2 and, with 4 requests, an eighth."""
    needs = replace(GPU, max_len=1 << 30)
    block = needs.block_bytes
    assert blocks(needs) == (int(80 * GIB * 0.9) - 20 * GIB - 2 * GIB - 128 * MIB) // block
    assert blocks(needs, memory_fraction=0.5) == (40 * GIB - 22 * GIB - 128 * MIB) // block
    assert blocks(needs, max_running_requests=32, memory_fraction=0.5) == 17 * GIB // block
    assert blocks(needs, kv_bytes=50 * GIB) == 50 * GIB // block, "as given, whatever is to come"


@pytest.mark.parametrize(
    "needs", [replace(with_free(each, 50 * GIB), max_len=1 << 30) for each in (CPU, GPU)]
)
def test_what_another_process_will_take_is_as_if_it_were_taken(needs: MemoryNeeds) -> None:
    less = with_free(needs, needs.device.free - GIB // 2)
    found = [blocks(own, memory_fraction=0.6) for own in (needs.without(GIB // 2), less, needs)]
    assert found[0] == found[1] < found[2]
    assert needs.without(1 << 60).device.free == 0


def test_weights_that_leave_no_room_are_refused_with_all_numbers() -> None:
    with pytest.raises(EngineError) as caught:
        blocks(with_free(GPU, 10 * GIB))
    assert str(caught.value) == (
        "one K/V block needs 16,384 bytes and there are 0: 85.9 GB on the GPU: 75.2 GB in use "
        "(weights, other processes), 2.3 GB to come for rounds and passes "
        "(max_running_requests 4), up to 0.0 GB for K/V (memory_fraction 0.9). Raise "
        "memory_fraction, lower max_running_requests, max_batched_tokens or max_model_len, or give "
        "kv_bytes."
    )
    assert blocks(with_free(GPU, 10 * GIB), memory_fraction=1.0) == 4 * FULL


def requests(needs: MemoryNeeds, **settings: Any) -> int | None:
    given = options(max_running_requests=None, **settings)
    return resolved_requests(needs, given).max_running_requests


def test_a_gpu_runs_as_many_requests_as_it_has_memory_for_at_1024_tokens() -> None:
    """64 blocks of a MiB and 32 MiB to be computed, in what 72 GiB leave beside 22."""
    needs = replace(GPU, block_bytes=MIB)
    assert requests(needs, memory_fraction=0.5) == 18 * GIB // (96 * MIB)
    assert requests(needs, kv_bytes=GIB) == 16, "computing is not in this memory"
    assert requests(replace(needs, max_len=511), kv_bytes=GIB) == 32, "no request is longer"
    assert requests(replace(needs, state_bytes=MIB, round_bytes=2 * MIB), kv_bytes=GIB) == 15
    memory = planned(needs, max_running_requests=requests(needs, memory_fraction=0.5))
    assert memory.cache.num_blocks * 16 >= 192 * 1024


def test_a_gpu_runs_one_request_at_least_and_a_full_round_at_most() -> None:
    assert requests(GPU) == MOST_REQUESTS
    assert requests(with_free(GPU, 1)) == requests(GPU, kv_bytes=1) == 1


def test_how_many_requests_run_is_left_as_told() -> None:
    assert resolved_requests(GPU, options(max_running_requests=512)).max_running_requests == 512
    assert requests(CPU) == 64


def test_blocks_that_hold_nothing_are_as_many_as_requests_need() -> None:
    """A trunk of recurrent layers alone has no K/V; its blocks are mere numbers."""
    needs = replace(RECURRENT, block_bytes=0, has_head=False)
    assert blocks(needs) == 4 * FULL


def planned(needs: MemoryNeeds, **settings: Any) -> Memory:
    return plan_memory(needs, options(**settings))


@pytest.mark.parametrize(
    ("needs", "speculate", "most"),
    [
        (RECURRENT, 3, 8 + 3), (RECURRENT, 0, 8), (RECURRENT, "auto", 8 + 3),
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
    """Rows of four requests in rounds are 2 MiB."""
    plan = planned(RECURRENT, kv_bytes=12 * MIB)
    assert plan.cache.num_states == 5, "half of 10 MiB"
    assert plan.cache.num_blocks == (12 - 2 - 5) * MIB // (16 * KIB)


def test_states_of_a_cpu_go_by_what_is_free() -> None:
    needs = replace(CPU, state_bytes=MIB, device=DeviceBytes(10 * MIB, 10 * MIB))
    plan = planned(needs)
    assert plan.cache.num_states == 4, "half of four fifths"
    assert plan.cache.num_blocks == int(6 * MIB * 0.8) // (16 * KIB)
    large = replace(needs, state_bytes=GIB, device=CPU.device)
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
    assert planned(RECURRENT, kv_bytes=12 * MIB).notes == [
        "85.9 GB on the GPU: 21.5 GB in use (weights, other processes), 2.3 GB to come for rounds "
        "and passes (max_running_requests 4), 0.0 GB for K/V (kv_bytes)",
        "320 K/V blocks of 16 tokens (5 MB)", "5 recurrent states of 1.0 MB",
        "0.5 MB for the newest rows of each request in rounds",
    ]  # fmt: skip
    assert planned(GPU).notes[0].endswith("up to 53.6 GB for K/V (memory_fraction 0.9)")


def test_rounds_without_a_head_have_no_menu_of_drafts() -> None:
    """Regression: with auto and no head a start captured a round with one draft, and failed."""
    config = SimpleNamespace(recurrent=None)
    bare = cast(Backend, SimpleNamespace(head=None, config=config))
    with_head = cast(Backend, SimpleNamespace(head=object(), config=config))
    auto = options(speculate="auto")
    assert round_sizes(bare, auto).menu == () and round_sizes(bare, auto).max_drafts == 0
    assert round_sizes(with_head, auto).menu[-1] == auto.max_drafts


RUNNING = {"with head": object(), "without": None}


@pytest.mark.parametrize("recurrent", [None, object()], ids=["attention", "recurrent"])
@pytest.mark.parametrize(("speculate", "head"), [("auto", "with head"), ("context", "without")])
def test_rounds_copy_as_many_tokens_as_the_engine_may_whatever_the_model(
    speculate: Any, head: str, recurrent: object
) -> None:
    """Regression: models without a head, and those with recurrent layers, copied 8."""
    asked = options(speculate=speculate)
    config = SimpleNamespace(recurrent=recurrent)
    sizes = round_sizes(cast(Backend, SimpleNamespace(head=RUNNING[head], config=config)), asked)
    assert sizes.copied == sizes.max_drafts == asked.max_copied == 16
    assert sizes.num_drafts == 8, "what memory for logits is planned by"


def test_recurrent_layers_of_rounds_are_made_for_a_fixed_number_of_drafts() -> None:
    own = cast(Backend, SimpleNamespace(head=object(), config=SimpleNamespace(recurrent=object())))
    assert round_sizes(own, options(speculate=3)).max_drafts == 3


def test_states_to_go_back_to_are_planned_for_copies_without_a_head() -> None:
    """Regression: a model without a head had none, whatever it copied."""
    bare = replace(RECURRENT, has_head=False, has_rounds=False, round_bytes=0)
    found = [
        plan_memory(bare, options(kv_bytes=GIB, speculate=own)).cache.num_states
        for own in (0, "context")
    ]
    assert found == [8, 8 + 3 * 4]


@pytest.mark.parametrize("state_bytes", [0, 100 * KIB, 40 * MIB])
def test_what_is_enough_for_so_many_requests_gives_them_blocks_and_states(state_bytes: int) -> None:
    """More than a gibibyte, which is what a CPU takes unasked."""
    needs = replace(CPU, block_bytes=MIB, state_bytes=state_bytes)
    given = enough_bytes(needs, options(max_running_requests=12), requests=12, tokens=2000)
    memory = plan_memory(needs, options(max_running_requests=12, kv_bytes=given))
    assert memory.cache.num_blocks >= 12 * 2000 // 16 and given > GIB
    assert memory.cache.num_states >= (2 * 12 if state_bytes else 0)
    little = enough_bytes(with_free(needs, GIB), options(), requests=12, tokens=2000)
    assert little == int(0.8 * GIB), "a fifth of what is free is left"
