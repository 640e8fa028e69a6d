"""How far each module is filled, after a start and after a prefix hit."""

from __future__ import annotations

import pytest
import torch

from headstart.engine.head_progress import HeadProgress


def states(*values: float) -> torch.Tensor:
    return torch.tensor([[value] for value in values])


def test_module_j_begins_at_slot_j_plus_one() -> None:
    track = HeadProgress.start(3, states(0))
    assert track.done == [1, 2, 3]
    assert [len(own) for own in track.states] == [0, 0, 0]


def test_a_slot_is_ready_when_its_state_and_its_token_are_known() -> None:
    track = HeadProgress.start(1, states(0))
    assert track.ready(0, 5) == 0
    track.feed(0, states(10, 11, 12))
    assert track.ready(0, 3) == 2
    assert track.ready(0, 9) == 3
    track.advance(0, 2)
    assert (track.done, track.states[0].tolist()) == ([3], [[12]])


@pytest.mark.parametrize(
    ("at", "done", "kept"),
    [(8, [8, 8, 8], [[70], [71], [72]]), (3, [3, 3, 3], [[70], [71], [72]]),
     (2, [2, 2, 3], [[70], [71], []]), (1, [1, 2, 3], [[70], [], []])],
)  # fmt: skip
def test_a_chained_head_resumes_with_one_state_for_each_module_that_has_begun(
    at: int, done: list[int], kept: list[list[float]]
) -> None:
    """Regression: after a hit shorter than its number, a module filled slots that stay empty."""
    track = HeadProgress.resume(at, states(70, 71, 72), parallel=False)
    assert track.done == done
    assert [own.flatten().tolist() for own in track.states] == kept


@pytest.mark.parametrize(
    ("at", "done", "kept"),
    [(8, [8, 8, 8], [[7], [6, 7], [5, 6, 7]]), (2, [2, 2, 3], [[7], [6, 7], [6, 7]]),
     (1, [1, 2, 3], [[7], [7], [7]])],
)  # fmt: skip
def test_a_parallel_head_resumes_with_the_last_states_of_the_trunk(
    at: int, done: list[int], kept: list[list[float]]
) -> None:
    track = HeadProgress.resume(at, states(7, 6, 5), parallel=True)
    assert track.done == done
    assert [own.flatten().tolist() for own in track.states] == kept


def test_what_is_left_does_not_keep_the_memory_of_what_is_done() -> None:
    """Regression: one row was a slice of a whole prompt's states."""
    track = HeadProgress.start(1, states(0))
    track.feed(0, states(*range(400)))
    track.advance(0, 399)
    assert track.states[0].tolist() == [[399]]
    assert track.states[0].untyped_storage().nbytes() == track.states[0].nbytes
