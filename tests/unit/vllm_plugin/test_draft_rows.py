"""Rows of an LM head and the choice among them, as vLLM's draft classes use them, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.errors import ConfigError
from headstart.vllm_plugin.logits import DraftLogits
from headstart.vllm_plugin.rows import DraftRows, int8_rows

VOCAB, HIDDEN, ROWS = 50, 16, 7
IDS = tuple(range(1, VOCAB, 3))


class LmHead(nn.Module):
    """One rank's part of vLLM's ParallelLMHead: a range of tokens, and padding behind the last."""

    def __init__(self, whole: Tensor, rank: int = 0, tp_size: int = 1, padding: int = 6):
        super().__init__()
        width = (len(whole) + padding) // tp_size
        first = rank * width
        rows = torch.cat([whole, torch.full((padding, whole.shape[1]), 1e4)])
        self.weight = nn.Parameter(rows[first : first + width].clone(), requires_grad=False)
        self.tp_size, self.num_embeddings_per_partition = tp_size, width
        self.embedding_dim = whole.shape[1]
        end = min(first + width, len(whole))
        self.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end)


class QuantizedLmHead(LmHead):
    """Values in eight bits that only a product of its own can read."""

    def __init__(self, whole: Tensor):
        super().__init__(whole)
        packed, scales = int8_rows(self.weight)
        del self.weight
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.quant_method = SimpleNamespace(
            apply=lambda head, x: x @ (head.packed * head.scales[:, None]).to(x.dtype).t()
        )


@pytest.fixture
def whole() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))


def stock(**fields: Any) -> nn.Module:
    """What ours reads of a LogitsProcessor."""
    made = nn.Module()
    for name, value in {"scale": 1.0, "org_vocab_size": VOCAB, **fields}.items():
        setattr(made, name, value)
    return made


def best_listed(whole: Tensor, hidden: Tensor, ids: Sequence[int]) -> list[int]:
    columns = (hidden @ whole.t())[:, list(ids)].argmax(-1)
    return [ids[int(column)] for column in columns]


def test_all_tokens_choose_as_the_whole_head_does(whole: Tensor, hidden: Tensor) -> None:
    head = LmHead(whole)
    for ids in (None, tuple(range(VOCAB))):
        found = DraftLogits(stock(), ids).get_top_tokens(head, hidden)
        assert found.dtype == torch.int64
        assert found.tolist() == (hidden @ whole.t()).argmax(-1).tolist()


def test_only_listed_tokens_are_chosen(whole: Tensor, hidden: Tensor) -> None:
    logits = DraftLogits(stock(), IDS)
    with logits.choosing():
        found = logits(LmHead(whole), hidden)
    assert found.tolist() == best_listed(whole, hidden, IDS)
    assert found.tolist() != (hidden @ whole.t()).argmax(-1).tolist(), "the list must cost drafts"


def test_logits_of_the_whole_width_have_minus_infinity_elsewhere(
    whole: Tensor, hidden: Tensor
) -> None:
    found = DraftLogits(stock(), IDS)(LmHead(whole), hidden)
    assert found.shape == (ROWS, VOCAB)
    torch.testing.assert_close(found[:, list(IDS)], (hidden @ whole.t())[:, list(IDS)])
    others = [token for token in range(VOCAB) if token not in IDS]
    assert torch.isneginf(found[:, others]).all()
    probabilities = found.softmax(-1)
    torch.testing.assert_close(probabilities[:, list(IDS)].sum(-1), torch.ones(ROWS))


def test_scale_and_soft_cap_are_those_of_the_model(whole: Tensor, hidden: Tensor) -> None:
    found = DraftLogits(stock(scale=0.5, soft_cap=2.0), IDS)(LmHead(whole), hidden)
    expected = torch.tanh((hidden @ whole.t()) / 2.0) * 2.0 * 0.5
    torch.testing.assert_close(found[:, list(IDS)], expected[:, list(IDS)])


class Ranks:
    """Both ranks of a group in one process: each gives its part, then gets all of them."""

    def __init__(self, heads: list[LmHead], ids: Sequence[int]):
        self.heads, self.parts = heads, list[Tensor]()
        self.logits = [DraftLogits(stock(), ids, gather=self._part) for _ in heads]

    def _part(self, part: Tensor) -> Tensor:
        self.parts.append(part)
        kept = [torch.zeros_like(part)] * len(self.heads)
        return torch.cat([*self.parts, *kept][: len(self.heads)], dim=-1)

    def run(self, hidden: Tensor, *, choosing: bool) -> Tensor:
        """The last rank's answer, which has seen every part."""
        self.parts.clear()
        for head, logits in zip(self.heads, self.logits, strict=True):
            found = logits.get_top_tokens(head, hidden) if choosing else logits(head, hidden)
        return found


@pytest.mark.parametrize("ids", [IDS, tuple(range(30, 45)), (3, 9), tuple(range(VOCAB))],
                         ids=["both ranks", "mostly one", "one rank has none", "all"])  # fmt: skip
def test_two_ranks_choose_what_one_does(
    whole: Tensor, hidden: Tensor, ids: tuple[int, ...]
) -> None:
    ranks = Ranks([LmHead(whole, rank, tp_size=2) for rank in range(2)], ids)
    assert ranks.run(hidden, choosing=True).tolist() == best_listed(whole, hidden, ids)
    kept = [rows.ids.tolist() for each in ranks.logits for _, rows in each._rows.values()]
    assert sorted(kept[0] + kept[1]) == list(ids), "each rank keeps the ids of its own range"
    alone = DraftLogits(stock(), ids)(LmHead(whole), hidden)
    torch.testing.assert_close(ranks.run(hidden, choosing=False), alone)


def test_a_quantised_lm_head_is_read_through_its_own_product(whole: Tensor, hidden: Tensor) -> None:
    head = QuantizedLmHead(whole)
    values = (head.packed * head.scales[:, None])[:VOCAB]
    found = DraftLogits(stock(), IDS).get_top_tokens(head, hidden)
    assert found.tolist() == best_listed(values, hidden, IDS)


def test_an_lm_head_without_rows_and_product_is_refused(whole: Tensor, hidden: Tensor) -> None:
    head = QuantizedLmHead(whole)
    head.quant_method = None
    with pytest.raises(ConfigError, match="Leave the LM head unquantised"):
        DraftLogits(stock(), IDS).get_top_tokens(head, hidden)


def test_new_weights_reach_the_rows_at_the_same_address(whole: Tensor, hidden: Tensor) -> None:
    head, logits = LmHead(whole), DraftLogits(stock(), IDS, is_int8=True)
    logits.get_top_tokens(head, hidden)
    rows = logits.rows(head, hidden)
    where = rows.weight.data_ptr()
    head.weight.copy_(-head.weight)
    logits.refill()
    assert logits.get_top_tokens(head, hidden).tolist() == best_listed(-whole, hidden, IDS)
    assert rows.weight.data_ptr() == where
    assert rows.int8 is not None
    torch.testing.assert_close(rows.int8[0] * rows.int8[1][:, None], rows.weight, atol=0.02, rtol=0)


def test_several_lm_heads_have_rows_of_their_own(whole: Tensor, hidden: Tensor) -> None:
    """Heads with several modules may bring an LM head for each."""
    logits = DraftLogits(stock(), IDS)
    first, second = LmHead(whole), LmHead(-whole)
    assert logits.get_top_tokens(first, hidden).tolist() == best_listed(whole, hidden, IDS)
    assert logits.get_top_tokens(second, hidden).tolist() == best_listed(-whole, hidden, IDS)


def test_what_a_vocabulary_cannot_answer_is_refused(whole: Tensor, hidden: Tensor) -> None:
    with pytest.raises(ConfigError, match="multiplies its logits by -1"):
        DraftLogits(stock(scale=-1.0), IDS)
    with pytest.raises(ConfigError, match="a bias, or those of one rank"):
        DraftLogits(stock(), IDS)(LmHead(whole), hidden, torch.zeros(VOCAB))


def test_rows_have_the_type_that_the_model_asks_of_its_lm_head(
    whole: Tensor, hidden: Tensor
) -> None:
    head = LmHead(whole.bfloat16())
    rows = DraftRows(head, IDS, is_int8=False, dtype=torch.float32)
    assert rows.scores(hidden.bfloat16()).dtype == torch.float32
