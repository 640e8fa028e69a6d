"""An indexer's kernels against the plain modules: rows, scores, and what is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.kernels import index_choice
from headstart.backends.cuda.kernels.index_choice import Texts, choose_entries, index_scores
from headstart.backends.cuda.kernels.index_rows import index_queries, keep_index
from headstart.backends.cuda.kernels.latent_rows import Turn
from headstart.models.indexer import Indexer, IndexRows, best_of, scores_of
from headstart.models.mla_config import LATENT_EPS, IndexConfig
from headstart.models.rope import RopeConfig, RotaryTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, ROPE, PAGE = 3, 12, 6, 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("own", [
    {"is_interleaved": False}, {"is_interleaved": True},
    {"is_interleaved": False, "rotates_last": True},
])  # fmt: skip
def test_rows_are_those_of_the_plain_indexer(own: dict[str, Any]) -> None:
    indexer = Indexer(16, 8, IndexConfig(heads=HEADS, dim=DIM, top_k=4, **own)).to(DEVICE)
    for number, parameter in enumerate(indexer.parameters()):
        parameter.data = random(*parameter.shape, seed=number)
    x, latent = random(3, 16, seed=8), random(3, 8, seed=9)
    table = RotaryTable(RopeConfig("default", 1e4, ROPE, is_interleaved=True), 16, torch.float32)
    table = table.to(DEVICE)
    positions = torch.tensor([5, 11, 0], device=DEVICE)
    rows, wanted_keys = indexer.project(x, latent, table.at(positions))
    turn = Turn(table.cos, table.sin, True, positions)
    kind = {"is_interleaved": own["is_interleaved"], "rotates_last": "rotates_last" in own}
    slots, keys = torch.tensor([2, -1, 0], device=DEVICE), torch.zeros(4, DIM, device=DEVICE)

    def halves(product: Tensor) -> Tensor:
        return torch.stack([product * 0.25, product * 0.75])

    norm = (indexer.k_norm_weight, indexer.k_norm_bias)
    keep_index(halves(indexer.k(x)), norm, LATENT_EPS, turn, slots.int(), keys, **kind)
    torch.testing.assert_close(keys[[2, 0]], wanted_keys[[0, 2]], rtol=1e-4, atol=1e-5)
    assert not keys[[1, 3]].any()
    q, weights = index_queries(
        halves(indexer.q_up(latent)), halves(indexer.weights(x)), HEADS, turn, torch.float32, **kind
    )
    torch.testing.assert_close(q * DIM**-0.5, rows.q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights * DIM**0.5, rows.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("first_slot", [0, 2])
def test_the_best_entries_are_chosen_in_order(
    tile: int, first_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long request, one that sees few entries, none; a last one whose scores are mostly equal."""
    monkeypatch.setattr(index_choice, "_TILE", tile)
    monkeypatch.setattr(index_choice, "_STEP", 16)
    rows, top_k, seen = 2, 9, [70, 4, -1, 40]
    q, weights = random(8, HEADS, DIM), random(8, HEADS, seed=1)
    keys = random(100, DIM, seed=2)
    q[6:] = -q[6:].abs()
    keys[48:] = keys[48:].abs()  # what the last one sees: all scores are 0, of both signs
    order = [torch.randperm(25, generator=torch.Generator().manual_seed(i))[:20] for i in range(4)]
    order[3][:13] = torch.arange(12, 25)
    tables = torch.stack(order).int().to(DEVICE)
    texts = Texts(
        tables, torch.tensor(seen, dtype=torch.int32, device=DEVICE), rows, PAGE, 76, first_slot
    )
    scores = index_scores(q, weights, keys, texts, top_k)
    chosen, last = choose_entries(scores, texts, top_k, 8)
    for line in range(8):
        first = seen[line // rows]
        if first < 0:
            assert last[line] == -1
            continue
        at = torch.arange(first_slot, first + line % rows + 1, device=DEVICE)
        slots = tables[line // rows].long()[at // PAGE] * PAGE + at % PAGE
        own = IndexRows(q[line : line + 1], weights[line : line + 1])
        wanted = slots[best_of(scores_of(own, "md", keys[slots]), top_k)[0]]
        assert chosen[line, : int(last[line]) + 1].tolist() == wanted.tolist()
    assert int(last[2]) == 4 - first_slot and int(last[0]) == top_k - 1
