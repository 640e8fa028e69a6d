"""Rows of a long prompt attend in pieces: the same result, without a mask of gigabytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.models import row_attention
from headstart.models.attention import LayerCache, Span, attend_span
from headstart.models.row_attention import attend_chosen

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 37, 90, 6, 2, 8


@pytest.mark.parametrize("window", [None, 20], ids=["all", "window"])
@pytest.mark.parametrize("step", [1, 8, 36], ids="{}-rows".format)
def test_rows_in_pieces_see_what_they_would_see_together(
    monkeypatch: pytest.MonkeyPatch, step: int, window: int | None
) -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    cache = LayerCache(random(LENGTH, KV_HEADS, DIM), random(LENGTH, KV_HEADS, DIM))
    q, span = random(ROWS, HEADS, DIM), Span(0, ROWS, slice(53, 90), slice(0, LENGTH))
    together = attend_span(q, cache, span, window)
    rows_seen, inner = list[int](), row_attention._attend

    def watched(part: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows_seen.append(len(part))
        return inner(part, *rest)

    monkeypatch.setattr(row_attention, "_attend", watched)
    monkeypatch.setattr(row_attention, "_MASK_VALUES", step * LENGTH * HEADS // KV_HEADS)
    assert torch.allclose(attend_span(q, cache, span, window), together, rtol=1e-12, atol=1e-14)
    assert max(rows_seen) == step and sum(rows_seen) == ROWS


@pytest.mark.parametrize("step", [1, 8, 36], ids="{}-rows".format)
def test_rows_that_see_a_choice_come_in_pieces_too(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    torch.manual_seed(step)
    q, values = (torch.randn(n, HEADS, DIM).double() for n in (ROWS, LENGTH))
    last = torch.arange(LENGTH - ROWS, LENGTH)[:, None]
    allowed = (torch.rand(ROWS, LENGTH) < 0.3) & (torch.arange(LENGTH) <= last)
    allowed[:, 0] = True
    together = attend_chosen(q, values, values, allowed)
    rows_seen, inner = list[int](), row_attention.attend_allowed

    def watched(part: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows_seen.append(len(part))
        return inner(part, *rest)

    monkeypatch.setattr(row_attention, "attend_allowed", watched)
    monkeypatch.setattr(row_attention, "_MASK_VALUES", step * LENGTH)
    found = attend_chosen(q, values, values, allowed)
    assert torch.allclose(found, together, rtol=1e-12, atol=1e-14)
    assert max(rows_seen) == step and sum(rows_seen) == ROWS
