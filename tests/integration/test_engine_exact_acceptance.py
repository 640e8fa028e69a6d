"""Counters that can be computed by hand: with output projections zero a head is a function of its
token alone, right outside the set S and wrong inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import AGREEING, checkpoint, greedy, run, start
from support.head_edits import edited
from support.long_runs import IS_LONG
from support.tiny_fixture import Tiny

from headstart.calibrate.agreement import Agreement, make_agreement
from headstart.sampling.acceptance import Acceptance

RATE = 0.7
MAX_TOKENS = 30


def exact(tiny: Tiny, family: str, modules: int) -> Path:
    """Output projections zero, and nothing of the hidden state in the fusion."""
    count = {"num_nextn_predict_layers": modules} if family == "mimo" else {}
    folder = checkpoint(tiny, family, rate=RATE, **count)
    out = folder.parent / f"{folder.name}-exact"
    if out.exists():
        return out

    def silence(own: dict[str, torch.Tensor]) -> None:
        for name, value in own.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()
            elif name.endswith("input_proj.weight"):  # hidden first
                value[:, : value.shape[0]] = 0
            elif name.endswith("mtp.fc.weight"):  # embedding first
                value[:, value.shape[0] :] = 0

    return edited(folder, out, change=silence)


def facts() -> Agreement:
    return make_agreement(
        AGREEING["vocab_size"], AGREEING["hidden_size"], rate=RATE, seed=AGREEING["seed"]
    )


def predict(facts: Agreement, last: int, speculate: int) -> tuple[list[int], Acceptance]:
    """Walk the cycle: the text after `last`, and what becomes of every draft."""

    def guess(token: int) -> int:
        return int((facts.mistaken if facts.in_s[token] else facts.following)[token])

    text = [int(facts.following[last])]
    counters = Acceptance()
    while len(text) < MAX_TOKENS:
        drafts, accepted = [], 0
        for _ in range(min(speculate, MAX_TOKENS - len(text) - 1)):
            drafts.append(guess(drafts[-1] if drafts else text[-1]))
        for draft in [*drafts, None]:
            text.append(int(facts.following[text[-1]]))
            if draft != text[-1]:
                break
            accepted += 1
        counters.observe(len(drafts), accepted)
    return text, counters


PROMPTS = [[3, 9, 4, 50, 21, 8, 40], [3, 9, 4, 50, 21, 8, 33, 60], [60, 2, 31, 5, 17], [9] * 12]
HEADS: dict[str, tuple[str, int, str | None]] = {
    "mimo, one module": ("mimo", 1, None),
    "qwen3, one module": ("qwen3", 1, None),
    "two chained": ("mimo", 2, "chained"),
    "three chained": ("mimo", 3, "chained"),
    "two parallel": ("mimo", 2, "parallel"),
    "three parallel": ("mimo", 3, "parallel"),
}


def one_by_one(engine: Any, speculate: int, facts: Agreement) -> list[tuple[Any, Any]]:
    """Counters of each prompt beside the prediction; asked twice, so that the second is a hit."""
    pairs = []
    for prompt in [*PROMPTS, *PROMPTS]:
        result = run(engine, [prompt], greedy(MAX_TOKENS))[0]
        text, counters = predict(facts, prompt[-1], speculate)
        assert result.outputs[0].token_ids == text
        pairs.append((result.stats.acceptance, counters))
    return pairs


# Every K with a third of the heads; blocks and rows of both sizes take turns, unless there is
# time for all.
SIZES = ((1, 6), (3, 7))
CASES = [
    (head, k, *sizes)
    for number, head in enumerate(HEADS)
    for k in range(1, 6)
    for turn, sizes in enumerate(SIZES)
    if IS_LONG or ((number + k) % 3 == 0 and (number // 3 + k + turn) % 2 == 0)
]


@pytest.mark.parametrize(("head", "speculate", "size", "rows"), CASES)
def test_counters_at_every_depth_are_those_of_the_walk(
    head: str, speculate: int, size: int, rows: int, tiny: Tiny
) -> None:
    family, modules, topology = HEADS[head]
    engine = start(
        exact(tiny, family, modules), speculate=speculate, topology=topology, block_size=size,
        max_batched_tokens=rows,
    )  # fmt: skip
    for found, expected in one_by_one(engine, speculate, facts()):
        assert found == expected
    overall = engine.stats.acceptance
    assert engine.stats.cached_tokens > 0
    assert all(0.2 <= rate <= 0.9 for rate in overall.conditional[:3])


def test_a_batch_counts_what_its_requests_count_alone(tiny: Tiny) -> None:
    engine = start(exact(tiny, "mimo", 1), speculate=3)
    for result in run(engine, PROMPTS, greedy(MAX_TOKENS)):
        _, expected = predict(facts(), result.prompt_token_ids[-1], 3)
        assert result.stats.acceptance == expected


def test_the_rate_over_the_whole_cycle_is_the_chosen_one(tiny: Tiny) -> None:
    known = facts()
    engine = start(exact(tiny, "mimo", 1), speculate=1, slots=4000)
    prompts = [[5, token, token] for token in range(AGREEING["vocab_size"])]
    run(engine, prompts, greedy(3))
    # One draft per request, on the token after the prompt's last: every token once.
    assert engine.stats.acceptance.drafted == [len(prompts)]
    assert engine.stats.acceptance.accepted == [int((~known.in_s).sum())]


def test_a_head_that_hears_the_hidden_state_counts_otherwise(tiny: Tiny) -> None:
    """The control: with its other parts alive the head departs from the walk."""
    engine = start(checkpoint(tiny, "mimo", rate=RATE), speculate=3)
    found = run(engine, PROMPTS, greedy(MAX_TOKENS))
    expected = [predict(facts(), prompt[-1], 3)[1] for prompt in PROMPTS]
    assert [result.stats.acceptance for result in found] != expected
