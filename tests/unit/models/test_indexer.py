"""What an indexer lets a row see: the best entries, the earlier of equals, its own chain's too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.errors import BadConfig
from headstart.models import indexer
from headstart.models.attention import Seen
from headstart.models.config_reader import model_config
from headstart.models.indexer import Indexer, IndexRows
from headstart.models.mla_config import IndexConfig

CONFIG = IndexConfig(heads=1, dim=1, top_k=3, is_interleaved=False)
RAW: dict[str, Any] = {
    "model_type": "deepseek_v32", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "q_lora_rank": 20,
    "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
}  # fmt: skip


def chosen(keys: list[float], rows: int, own: list[list[float]] | None = None) -> list[list[int]]:
    """Places that each of the last rows sees, if its score of a key is the key."""
    part = Seen(
        slice(0, rows),
        torch.tensor(keys)[:, None],
        None if own is None else torch.tensor(own)[..., None],
    )
    asking = IndexRows(torch.ones(rows, 1, 1), torch.ones(rows, 1))
    allowed = Indexer(4, 4, CONFIG).choose(asking, part)
    if allowed is None:
        return [list(range(len(keys) - rows + 1 + row)) for row in range(rows)]
    return [row.nonzero().squeeze(1).tolist() for row in allowed]


def test_the_best_are_seen_and_nothing_that_comes_later() -> None:
    assert chosen([5, 1, 4, 2, 9, 8], rows=3) == [[0, 2, 3], [0, 2, 4], [0, 4, 5]]


def test_of_equals_the_earlier_ones_are_seen_whatever_rows_come_along() -> None:
    """Scores below 0 count as 0, so equals are common."""
    keys = [-3.0, 2, -1, -1, -2, 1, -7]
    alone = [chosen(keys[: at + 1], rows=1)[0] for at in range(3, 7)]
    assert chosen(keys, rows=4) == alone == [[0, 1, 2], [0, 1, 2], [0, 1, 5], [0, 1, 5]]


def test_a_chain_chooses_among_its_passage_and_itself() -> None:
    own = [[7.0, 0, 7, 7], [0.0, 7, 6, 0]]  # of two steps, by row
    found = chosen([5, 4, 3, 6], rows=4, own=own)
    assert found == [[0, 4, 5], [0, 1, 5], [0, 4, 5], [0, 3, 4]]


def test_few_entries_are_all_seen() -> None:
    part = Seen(slice(0, 3), torch.zeros(3, 1))
    rows = IndexRows(torch.ones(3, 1, 1), torch.ones(3, 1))
    assert Indexer(4, 4, CONFIG).choose(rows, part) is None


@pytest.mark.parametrize("chain", [0, 2])
def test_rows_in_parts_choose_what_they_would_choose_together(
    chain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the scores of all rows would take, those of a few are all there is at a time."""
    torch.manual_seed(chain)
    heads, rows, length, size = 3, 7, 7 if chain else 19, 4
    config = IndexConfig(heads=heads, dim=size, top_k=5, is_interleaved=False)
    own = torch.randn(chain, rows, 6).double() if chain else None
    part = Seen(slice(2, 2 + rows), torch.randn(length, 6).double(), own)
    asking = IndexRows(torch.randn(12, heads, size).double(), torch.randn(12, heads).double())
    sizes, inner = list[int](), indexer.scores_of

    def watched(some: IndexRows, axes: str, keys: torch.Tensor) -> torch.Tensor:
        sizes.append(len(some.q))
        return inner(some, axes, keys)

    monkeypatch.setattr(indexer, "scores_of", watched)
    together = Indexer(4, 4, config).choose(asking, part)
    assert together is not None and set(sizes) == {rows}
    assert 0 < together[-1].sum() < together.shape[1] == length + chain
    for at_once in (1, 3):
        sizes.clear()
        monkeypatch.setattr(indexer, "SCORE_VALUES", at_once * heads * (length + chain))
        found = Indexer(4, 4, config).choose(asking, part)
        assert found is not None and torch.equal(found, together)
        assert max(sizes) == at_once and sum(sizes) == rows * (2 if chain else 1)


def test_an_index_key_is_kept_beside_the_latent_where_a_layer_has_an_indexer() -> None:
    config = model_config(RAW)
    assert config.kept(config.layers[0]) == ((16 + 6 + 8,), (0,))
    shared = model_config({**RAW, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]})
    assert [kind.index for kind in shared.layers] == ["own", "shared"]
    assert shared.kept(shared.layers[1]) == ((16 + 6,), (0,))
    assert shared.kept(shared.head_layer) == ((16 + 6 + 8,), (0,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index_head_dim": 4}, "at least the 6 numbers that are rotated"),
        ({"index_topk": 0}, "expected whole numbers above 0"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        (
            {"model_type": "glm_moe_dsa", "indexer_types": ["shared", "full"]},
            "the first layer has no indexer",
        ),
    ],
    ids=str,
)
def test_indexers_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        model_config({**RAW, **change})
