"""Rows that attend by themselves: the bits that each would get if it came alone."""

from __future__ import annotations

import pytest
import torch

from headstart.models.attention import MAX_LONE_ROWS, LayerCache, PagedContext, Places, Span

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 16, 96


def attended(rows: int, context: Places, *, lone: bool, window: int | None = None) -> torch.Tensor:
    """What `rows` new rows at the end of `context` get."""
    generator = torch.Generator().manual_seed(5)
    cache = LayerCache(*torch.randn(2, SLOTS, KV_HEADS, DIM, generator=generator))
    q = torch.randn(rows, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, rows, KV_HEADS, DIM, generator=generator)
    if isinstance(context, slice):
        new: Places = slice(context.stop - rows, context.stop)
    else:
        new = context[-rows:]
    if lone:
        span = Span(0, rows, new, context)
        return PagedContext(cache, [span], lone_rows=True).attend(q, k, v, window)
    slots = torch.arange(SLOTS)
    results = []
    for row in range(rows):
        own = Span(0, 1, slots[new][row : row + 1], slots[context][: row + 1 - rows or None])
        parts = (part[row : row + 1] for part in (q, k, v))
        results.append(PagedContext(cache, [own]).attend(*parts, window))
    return torch.cat(results)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", [1, 4, MAX_LONE_ROWS])
def test_each_of_a_few_rows_gets_what_it_gets_alone(rows: int, window: int | None) -> None:
    for context in (slice(16, 80), torch.arange(80).flip(0)[:70]):
        alone = attended(rows, context, lone=False, window=window)
        torch.testing.assert_close(
            attended(rows, context, lone=True, window=window), alone, rtol=0, atol=0
        )


def test_more_rows_are_a_prompt_and_attend_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def attend_span(q: torch.Tensor, *_: object) -> torch.Tensor:
        asked.append(len(q))
        return q.flatten(1)

    monkeypatch.setattr("headstart.models.attention.attend_span", attend_span)
    attended(MAX_LONE_ROWS + 1, slice(0, 64), lone=True)
    attended(2, slice(0, 64), lone=True)
    assert asked == [MAX_LONE_ROWS + 1, 1, 1]
