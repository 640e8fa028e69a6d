"""The simulator against a speculative loop written out, and on heads that are being trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.models.build import LoadedModel, build
from headstart.models.documents import Documents, Passage
from headstart.models.unroll import trunk_states
from headstart.sampling.acceptance import Acceptance
from headstart.simulate.answers import GREEDY, Answer, Batch
from headstart.simulate.matches import DraftLogits, answer_matches, unrolled
from headstart.simulate.rates import Rates, rates

SIZES: dict[str, Any] = {
    "hidden_size": 128, "vocab_size": 64, "head_dim": 16, "intermediate_size": 64,
    "num_hidden_layers": 2, "rate": 0.9, "seed": 1, "dtype": "F32",
}  # fmt: skip
PROMPTS = [[5, 9, 33, 21], [60, 2], [7], [14, 3, 3, 50, 41, 8]]
LENGTH = 16


@pytest.fixture(scope="module", params=["mimo", "qwen3"])
def folder(request: pytest.FixtureRequest, tiny: Tiny) -> Path:
    return tiny(request.param, **SIZES)


def load(folder: Path, dtype: str = "float64") -> LoadedModel:
    return build(Checkpoint.open(folder), device="cpu", dtype=dtype)


class Loop:
    """Greedy speculative decoding without any cache: everything is computed anew in every round."""

    def __init__(self, built: LoadedModel):
        assert built.head is not None
        self.trunk, self.head = built.trunk, built.head

    def states(self, ids: list[int]) -> torch.Tensor:
        return trunk_states(
            self.trunk, torch.tensor(ids), Documents((len(ids),)), "after_final_norm"
        )

    def next(self, ids: list[int]) -> int:
        return int(self.trunk.logits(self.states(ids))[-1].argmax())

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The head over all (state, token) pairs, its own outputs appended as they come."""
        known, inputs = list(ids), self.states(ids[:-1])
        for _ in range(count):
            tokens = torch.tensor(known[1:])
            normed, recycled = self.head.module(1)(
                self.trunk.embed[tokens], inputs, torch.arange(len(tokens)), self.trunk.rotary,
                Passage(Documents((len(tokens),))),
            )  # fmt: skip
            known.append(int(self.trunk.logits(normed[-1:]).argmax()))
            inputs = torch.cat([inputs, recycled[-1:]])
        return known[len(ids) :]

    def run(self, prompt: list[int], num_drafts: int) -> tuple[list[int], Acceptance]:
        ids, counters = [*prompt, self.next(prompt)], Acceptance()
        while (left := len(prompt) + LENGTH - len(ids)) > 0:
            drafts = self.drafts(ids, min(num_drafts, left - 1))
            chosen = self.trunk.logits(self.states([*ids, *drafts])).argmax(-1).tolist()
            chosen = chosen[len(ids) - 1 :]
            accepted = 0
            while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
                accepted += 1
            ids += chosen[: accepted + 1]
            counters.observe(len(drafts), accepted)
        return ids, counters


def batches(
    built: LoadedModel, texts: list[list[int]], dtype: torch.dtype | None = None
) -> list[Batch]:
    """Two documents in a batch, with states as a cache would give them."""
    result = []
    for start in range(0, len(texts), 2):
        part = texts[start : start + 2]
        documents = Documents(tuple(len(ids) for ids in part))
        joined = torch.tensor([token for ids in part for token in ids])
        states = trunk_states(built.trunk, joined, documents, "after_final_norm")
        answers = [
            Answer(
                record_id=str(start + i), prompt_id=str(start + i), document=i,
                start=len(PROMPTS[start + i]), stop=len(ids), limit=LENGTH, params=GREEDY,
            )
            for i, ids in enumerate(part)
        ]  # fmt: skip
        result.append(Batch(states.to(dtype or states.dtype), joined, documents, answers))
    return result


def simulated(
    built: LoadedModel,
    given: list[Batch],
    max_drafts: int = 8,
    draft_ids: torch.Tensor | None = None,
) -> Rates:
    """As scoring and validation put the parts together, from states that are given."""
    assert built.head is not None
    trunk, found = built.trunk, []
    logits = DraftLogits.of_weight(trunk.lm_head.weight, draft_ids)
    for batch in given:
        depths = unrolled(built.head, trunk.embed, trunk.rotary, batch, max_drafts)
        found += answer_matches(depths, batch, batch.answers, logits)
    return rates(found, max_drafts)


def test_simulator(folder: Path) -> None:
    """tau_sim equals tau of a reference greedy speculative loop, for few drafts and for many."""
    built = load(folder)
    loop = Loop(built)
    texts = [loop.run(prompt, 0)[0] for prompt in PROMPTS]
    found = simulated(built, batches(built, texts), max_drafts=8)
    for drafts in unless_long((0, 1, 2, 3, 8), range(9)):
        total = Acceptance()
        for prompt, text in zip(PROMPTS, texts, strict=True):
            written, counters = loop.run(prompt, drafts)
            assert written == text
            total.add(counters)
        assert found.walked[drafts] == total
        assert found.lengths[drafts] == total.length
        if drafts:
            assert 0.2 < total.conditional[0] < 0.9
    assert found.lengths[8] > found.lengths[1] > 1.2


def test_a_head_in_training_is_scored_in_its_own_precision(folder: Path) -> None:
    built = load(folder, "float32")
    texts = [Loop(built).run(prompt, 0)[0] for prompt in PROMPTS]
    expected = simulated(built, batches(built, texts), max_drafts=4)
    assert built.head is not None
    built.head.requires_grad_(True)
    given = batches(built, texts, torch.bfloat16)  # cached states are smaller than the weights
    found = simulated(built, given, max_drafts=4)
    assert all(p.grad is None for p in built.head.parameters())
    assert found.walked[4].cumulative[0] == pytest.approx(
        expected.walked[4].cumulative[0], abs=0.05
    )
    kept = torch.arange(0, 64, 2)
    fewer = simulated(built, batches(built, texts), max_drafts=4, draft_ids=kept)
    assert sum(fewer.walked[4].accepted) < sum(expected.walked[4].accepted)


def test_other_fusion_gives_other_counters(folder: Path) -> None:
    built = load(folder)
    texts = [Loop(built).run(prompt, 0)[0] for prompt in PROMPTS]
    right = simulated(built, batches(built, texts)).walked
    assert built.head is not None
    for module in built.head.modules_:
        first, second = module.fuse.weight.data.chunk(2, dim=1)
        module.fuse.weight.data = torch.cat([second, first], dim=1)
    assert simulated(built, batches(built, texts)).walked != right
