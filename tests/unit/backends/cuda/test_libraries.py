"""Libraries that attend for long prompts, against plain PyTorch and our kernel; on the CPU the same
way through PyTorch's own kernel, in small shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")

from headstart.backends.cuda import libraries
from headstart.backends.cuda.attending import EVERYTHING
from headstart.backends.cuda.libraries import (
    LIBRARIES,
    Library,
    by_cudnn,
    choose_library,
    piece_sizes,
    square_size,
    why_unusable,
)
from headstart.backends.cuda.prompts import ragged_rows
from headstart.models.attention import LayerCache, Span

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 160
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "STEP", 8)
    monkeypatch.setattr(libraries, "_LONGEST_PIECE", 16)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, length = q.shape[0], k.shape[0]
    seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)


def draw(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(rows)
    shapes = ((rows, HEADS, DIM), (length, KV_HEADS, DIM), (length, KV_HEADS, DIM))
    q, k, v = (torch.randn(shape, generator=source) for shape in shapes)
    return q, k, v


def test_rows_are_filled_up_to_few_sizes_and_little_of_them_is_blank() -> None:
    sizes = [square_size(rows) for rows in range(1024, 8193)]
    assert all(size >= rows for rows, size in enumerate(sizes, start=1024))
    assert max(size / rows for rows, size in enumerate(sizes, start=1024)) < 1.125
    assert len(set(sizes)) <= 25 and square_size(8192) == 8192 and square_size(8193) == 8704
    assert piece_sizes(0) == [] and piece_sizes(8) == [8] and piece_sizes(56) == [16] * 3 + [8]


@pytest.mark.parametrize(
    ("rows", "before"), [(32, 0), (21, 0), (16, 8), (21, 40), (9, 3), (13, 29)],
    ids=["square", "filled", "piece", "pieces", "joined", "all of it"],
)  # fmt: skip
def test_squares_and_pieces_give_what_one_mask_gives(rows: int, before: int) -> None:
    q, k, v = draw(rows, rows + before)
    found, wanted = by_cudnn(q, k, v), plain(q, k, v)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    if before:  # the control: as if nothing were before
        assert not torch.allclose(by_cudnn(q, k[before:], v[before:]), wanted, atol=0.01)


class Spied:
    """A library that remembers what it was asked."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = by_cudnn):
        self.asked: list[tuple[int, int]] = []
        self._attend = attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.asked.append((q.shape[0], k.shape[0]))
        return self._attend(q, k, v)

    def library(self, least: int = 8, later: int = 12) -> Library:
        return Library("spied", self, least, later)


def mixed_pass() -> tuple[list[Span], Tensor, LayerCache]:
    """A whole prompt, a chunk behind a cached prefix, one too short for that, a newest token."""
    kv_slots = torch.randperm(SLOTS - 40, generator=torch.Generator().manual_seed(1)) + 40
    spans = [
        Span(0, 20, slice(0, 20), slice(0, 20)),
        Span(20, 34, kv_slots[9:23], kv_slots[:23]),
        Span(34, 44, kv_slots[40:50], kv_slots[23:50]),
        Span(44, 45, slice(39, 40), slice(20, 40)),
    ]
    q, k, v = draw(45, SLOTS)
    return spans, q, LayerCache(k, v)


def test_long_prompts_of_a_pass_go_to_the_library_and_the_others_to_our_kernel() -> None:
    spans, q, cache = mixed_pass()
    spied, positions = Spied(), torch.arange(45)
    found = ragged_rows(spans, positions, spied.library()).attend(q, cache, EVERYTHING)
    assert spied.asked == [(20, 20), (14, 23)]
    torch.testing.assert_close(found, ragged_rows(spans, positions).attend(q, cache, EVERYTHING))
    lone = ragged_rows(spans[:1], positions[:20], spied.library()).attend(q[:20], cache, EVERYTHING)
    torch.testing.assert_close(lone, found[:20])


def test_scattered_slots_are_copied_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "MAX_GATHERED_SLOTS", 22)
    (whole, later, *_), *_ = mixed_pass()
    library = Spied().library()
    assert library.takes(whole) and not library.takes(later)
    assert library.takes(replace(later, context=slice(40, 63)))


@pytest.mark.parametrize("is_room", [False, True], ids=["out of memory", "refused"])
def test_a_library_that_fails_is_replaced_by_our_kernel(is_room: bool) -> None:
    def fail(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[0] != k.shape[0]:
            raise RuntimeError("no plan\nat all") if is_room else torch.OutOfMemoryError()
        return by_cudnn(q, k, v)

    spans, q, cache = mixed_pass()
    spied, positions = Spied(fail), torch.arange(45)
    library = spied.library()
    rows = ragged_rows(spans, positions, library)
    wanted = ragged_rows(spans, positions).attend(q, cache, EVERYTHING)
    for _ in range(2):
        torch.testing.assert_close(rows.attend(q, cache, EVERYTHING), wanted)
    assert library.trouble == ("no plan" if is_room else None)
    assert len(spied.asked) == (2 if is_room else 4)


def test_only_what_computes_as_our_kernel_does_is_taken() -> None:
    shape: dict[str, Any] = {"rows": 13, "slots": 42}

    def usable(library: Library) -> str | None:
        return why_unusable(library, HEADS, KV_HEADS, DIM, torch.float32, CPU, **shape)

    def from_the_first_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_cudnn(q, k[: q.shape[0]], v[: q.shape[0]])

    assert usable(LIBRARIES["cudnn"]) is None
    assert "differ" in (usable(Spied(from_the_first_key).library()) or "")
    assert choose_library(HEADS, KV_HEADS, DIM, torch.bfloat16, CPU) is None
