"""Copies from other answers are replayed as an engine makes them that answers one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.copying_runs import prompts_of
from support.engine_runs import run, seeded, soft, start
from support.tiny_fixture import Tiny

from headstart.copying.answers import AnswerStore
from headstart.simulate.copies import copied_rounds


@pytest.fixture(scope="module")
def flat(tiny: Tiny) -> Path:
    return soft(tiny)


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("drafts", [3, 16])
def test_rounds_are_those_of_an_engine_that_copies_from_answers(flat: Path, drafts: int) -> None:
    first, second = ([5, 9, 13, 17, 21, 33], prompts_of(flat)[0])
    params = seeded(temperature=1.0, max_tokens=30, speculate=drafts)
    engine = start(flat, speculate="context", draft_from_answers=2)
    store, alone = AnswerStore(2), list[bool]()
    for prompt in (first, second, first, second[:-1], first):
        (result,) = run(engine, [prompt], params)
        answer = result.outputs[0].token_ids
        replayed = copied_rounds(prompt, answer, drafts, 30, store)
        assert replayed == result.stats.rounds
        alone.append(copied_rounds(prompt, answer, drafts, 30) == replayed)
    assert alone[:3] == [True, True, False], "the third one copies from the first"
