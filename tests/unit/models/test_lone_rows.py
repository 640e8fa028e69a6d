"""Rows that attend by themselves: the bits that each would get if it came alone."""

from __future__ import annotations

import pytest
import torch

from headstart.models.attention import MAX_LONE_ROWS, LayerCache, PagedContext, Span
from headstart.models.row_invariant import Reach, Slots, attend_row_invariant

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 16, 96


def attended(
    rows: int,
    context: Slots,
    *,
    by_row: bool = False,
    lone: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """What `rows` new rows at the end of `context` get, at once or one after another."""
    generator = torch.Generator().manual_seed(5)
    cache = LayerCache(*torch.randn(2, SLOTS, KV_HEADS, DIM, generator=generator))
    q = torch.randn(rows, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, rows, KV_HEADS, DIM, generator=generator)
    slots = torch.arange(SLOTS)
    new = slots[context][-rows:]
    if not by_row:
        span = Span(0, rows, new, context)
        return PagedContext(cache, [span], lone_rows=lone).attend(q, k, v, window)
    results = []
    for row in range(rows):
        own = Span(0, 1, new[row : row + 1], slots[context][: row + 1 - rows or None])
        parts = (part[row : row + 1] for part in (q, k, v))
        results.append(PagedContext(cache, [own], lone_rows=lone).attend(*parts, window))
    return torch.cat(results)


CONTEXTS = (slice(16, 80), slice(2, 76), torch.arange(80).flip(0)[:70])  # the second passes 64


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, MAX_LONE_ROWS])
def test_each_of_a_few_rows_gets_the_bits_that_it_gets_alone(rows: int, window: int | None) -> None:
    for context in CONTEXTS:
        alone = attended(rows, context, by_row=True, window=window)
        together = attended(rows, context, window=window)
        torch.testing.assert_close(together, alone, rtol=0, atol=0)
        plain = attended(rows, context, lone=False, window=window)
        torch.testing.assert_close(together, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [attended(4, CONTEXTS[2], by_row=by_row) for by_row in (False, True)]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_what_stands_behind_the_context_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, SLOTS, KV_HEADS, DIM, generator=generator)
    q = torch.randn(3, HEADS, DIM, generator=generator)
    context = slice(8, 40)
    found = []
    for behind in (0.0, float("nan")):  # another request's, and its trouble
        k[40:], v[40:] = behind, behind
        found.append(attend_row_invariant(q, k, v, Reach.of(context, 3)))
    assert torch.equal(*found)


def test_more_rows_are_a_prompt_and_attend_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def attend_span(q: torch.Tensor, *_: object) -> torch.Tensor:
        asked.append(len(q))
        return q.flatten(1)

    monkeypatch.setattr("headstart.models.attention.attend_span", attend_span)
    attended(MAX_LONE_ROWS + 1, slice(0, 64))
    attended(2, slice(0, 64))
    assert asked == [MAX_LONE_ROWS + 1]
