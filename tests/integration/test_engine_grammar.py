"""Grammars: their masks hold in every row, and their failures stay their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.copying_runs import Parity
from support.engine_runs import (
    PROMPT,
    VOCAB,
    assert_head_is_alive,
    ids_of,
    make_prompts,
    run,
    seeded,
)

from headstart.engine.engine import Engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_in_every_row_and_does_not_depend_on_k(
    temperature: float, plain: Engine, drafting: Engine
) -> None:
    params = seeded(temperature=temperature)
    grammar = Parity()
    expected, found = (
        run(e, make_prompts(), params, grammar=grammar) for e in (plain, drafting)
    )  # fmt: skip
    assert ids_of(found) == ids_of(expected)
    assert all(token % 2 == i % 2 for ids in ids_of(found) for i, token in enumerate(ids))
    assert_head_is_alive(found)
    assert grammar.state == 0, "every sample works on a copy"


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_grammar_that_has_ended_ends_the_answer(acceptance: Any, drafting: Engine) -> None:
    params = seeded(acceptance=acceptance, logprobs=0)
    for limit in (1, 2, 3, 5, 8):
        output = run(drafting, [PROMPT], params, grammar=Parity(limit))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (limit, "stop")
        assert output.text.split(" ") == [f"t{token}" for token in output.token_ids]


class Failing(Parity):
    """Fails in one of its functions once `limit` tokens are accepted."""

    name = ""

    def _fail(self, name: str) -> None:
        if name == self.name and self.state >= self.limit:
            raise ValueError("no such rule")

    def allowed(self) -> Any:
        self._fail("allowed")
        if self.name == "a mask too short" and self.state >= self.limit:
            return torch.ones(VOCAB - 1, dtype=torch.bool)
        return torch.arange(VOCAB) % 2 == self.state % 2

    def accept(self, token: int) -> bool:
        self._fail("accept")
        self.state += 1
        return token % 2 != self.state % 2

    def fork(self) -> Any:
        self._fail("fork")
        copy = type(self)(self.limit, self.state)
        copy.name = self.name
        return copy


@pytest.mark.parametrize(
    ("name", "limit"),
    [("allowed", 0), ("allowed", 4), ("accept", 0), ("accept", 4), ("fork", 0),
     ("a mask too short", 0), ("a mask too short", 4)],
)  # fmt: skip
def test_a_grammar_that_fails_ends_its_own_request_and_nobody_elses(
    name: str, limit: int, plain: Engine, drafting: Engine
) -> None:
    """Regression: the exception left `step`, and every step after it raised again."""
    ends = []
    for engine in (plain, drafting):
        grammar = Failing(limit)
        grammar.name = name
        broken = engine.add(PROMPT, seeded(), grammar=grammar)
        other = engine.add(PROMPT, seeded())
        while engine.has_work:
            engine.step()
        assert engine.collect(other).outputs[0].finish_reason == "length"
        output = engine.collect(broken).outputs[0]
        assert output.finish_reason == "error"
        assert output.error is not None and "the grammar's" in output.error
        assert engine.pool.num_used == 0
        ends.append(output.token_ids)
    assert ends[0] == ends[1]
    assert len(ends[0]) == limit + (name == "accept")


class Counting(Parity):
    """Counts its masks, over all copies."""

    num_masks: list[int]

    def allowed(self) -> torch.Tensor:
        self.num_masks.append(self.state)
        return super().allowed()

    def fork(self) -> Counting:
        copy = Counting(self.limit, self.state)
        copy.num_masks = self.num_masks
        return copy


def test_each_mask_is_computed_once_although_drafts_and_rows_both_need_it(
    drafting: Engine,
) -> None:
    grammar = Counting()
    grammar.num_masks = []
    output = run(drafting, [PROMPT], seeded(), grammar=grammar)[0].outputs[0]
    assert_head_is_alive([*run(drafting, make_prompts(), seeded(), grammar=Parity())])
    # One for every token; those behind a wrong draft were for nothing, and behind the last one.
    wrong = sum(origin == "recovered" for origin in output.origins)
    assert len(grammar.num_masks) <= len(output.token_ids) + 3 * (wrong + 1)
    assert max(grammar.num_masks.count(state) for state in range(24)) <= 4
