"""Pairs of rows and experts, sorted by one launch as PyTorch sorts them; on the CPU interpreted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.kernels import sorting
from headstart.backends.cuda.kernels.sorting import Lists, sort_pairs, sort_plainly, tile_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choices(rows: int, each: int, num_experts: int, *, empty: float = 0.0) -> Tensor:
    """Random ones, the last of every row the same: a shared expert. Some rows choose none."""
    generator = torch.Generator().manual_seed(rows + each)
    chosen = torch.rand(rows, num_experts - 1, generator=generator).argsort(1)[:, :each]
    chosen[:, -1] = num_experts - 1
    chosen[torch.rand(rows, generator=generator) < empty] = -1
    return chosen.to(DEVICE, torch.int32)


def assert_equal(found: Lists, wanted: Lists) -> None:
    assert (found.count, found.tile) == (wanted.count, wanted.tile)
    for part in ("experts", "starts", "order"):
        assert torch.equal(getattr(found, part), getattr(wanted, part)), part


@pytest.mark.parametrize("sort", [sort_pairs, sort_plainly])
@pytest.mark.parametrize(
    ("rows", "num_experts", "empty"), [(65, 20, 0.0), (65, 20, 0.4), (90, 4, 0.4), (65, 5, 1.0)]
)
def test_every_pair_is_in_one_tile_of_its_expert(
    rows: int, num_experts: int, empty: float, sort: Callable[[Tensor, int], Lists]
) -> None:
    chosen = choices(rows, 3, num_experts, empty=empty)
    lists = sort(chosen, num_experts)
    ids, order = chosen.flatten().tolist(), lists.order.tolist()
    found: dict[int, list[int]] = {expert: [] for expert in range(num_experts)}
    tiles = zip(lists.experts.tolist(), lists.starts.tolist(), strict=True)
    for expert, (start, count) in tiles:
        assert 0 <= count <= lists.tile
        found[expert] += order[start : start + count]
    for expert, pairs in found.items():
        assert pairs == [pair for pair, own in enumerate(ids) if own == expert]


@pytest.mark.parametrize(
    ("rows", "each", "num_experts", "empty"),
    [(65, 3, 12, 0.0), (65, 3, 12, 0.2), (100, 2, 3, 0.7), (300, 1, 2, 0.0), (1, 1, 2, 0.0),
     (65, 2, 3, 1.0)],
    ids=["all", "some choose none", "most choose none", "one expert has all", "one", "none"],
)  # fmt: skip
@pytest.mark.parametrize("step", [64, 1024])
def test_the_launch_gives_what_torch_gives(
    rows: int, each: int, num_experts: int, empty: float, step: int
) -> None:
    chosen = choices(rows, each, num_experts, empty=empty)
    assert_equal(sort_pairs(chosen, num_experts, step), sort_plainly(chosen, num_experts))


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    rows = (24, 32, 40, 64, 128, 1500)
    sizes = {number: sort_pairs(choices(number, 2, 4), 4).tile for number in rows}
    assert sizes == {24: 16, 32: 32, 40: 32, 64: 64, 128: 64, 1500: 64}


def test_few_experts_have_more_pairs_than_a_tile() -> None:
    """An expert with more is read once for each tile."""
    for rows in (8, 16, 24, 32, 48, 64):
        chosen, experts = choices(rows, 8, 32), 32
        own = torch.bincount(chosen.flatten().long().clamp_min(0), minlength=experts)
        tile = tile_for(chosen.numel(), experts)
        assert int((own > tile).sum()) <= experts // 4
        assert tile == 16 or chosen.numel() / experts > tile / 4  # nor is it mostly empty


def test_very_many_pairs_are_sorted_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choices(70, 2, 5, empty=0.1)
    wanted = sort_pairs(chosen, 5)
    monkeypatch.setattr(sorting, "_sort", None)
    with pytest.raises(TypeError):
        sort_pairs(chosen, 5)
    monkeypatch.setattr(sorting, "_MOST_PAIRS", 139)
    assert_equal(sort_pairs(chosen, 5), wanted)
