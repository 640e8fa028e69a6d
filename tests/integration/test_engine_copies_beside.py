"""Copies beside grammars, draft vocabularies and every sampling setting, decided by the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.copying_runs import (
    Parity,
    assert_copies_are_alive,
    copied,
    origins_of,
    prompts_of,
    tokens_by_origin,
    with_both,
)
from support.engine_runs import VOCAB, greedy, ids_of, run, seeded, soft, start
from support.sampling_examples import EXAMPLES, TOGETHER
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.choose import TokenLogprob
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab

pytestmark = pytest.mark.usefixtures("no_clock")

EVERY_THIRD = DraftVocab(ids=tuple(range(0, VOCAB, 3)), name="small")


def by_context(folder: Path, **settings: Any) -> Engine:
    return start(folder, speculate=3, **settings)


def as_it_is(params: SamplingParams) -> SamplingParams:
    return params


class Source(NamedTuple):
    """An engine that copies, and what requests ask of it for that."""

    start: Callable[..., Engine]
    asked: Callable[[SamplingParams], SamplingParams]


def by_copies(params: SamplingParams) -> SamplingParams:
    return copied(params, params.speculate or 16)


SOURCES = {"context": Source(by_context, by_copies), "both": Source(with_both, as_it_is)}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Source:
    return SOURCES[request.param]


@pytest.fixture(scope="module")
def flat(tiny: Tiny) -> Path:
    return soft(tiny)


def assert_alive(results: list[Result], source: Source) -> None:
    assert_copies_are_alive(results)
    assert ("accepted" in origins_of(results)) == (source.start is with_both), "the head drafts"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_in_every_copied_row(
    flat: Path, source: Source, temperature: float
) -> None:
    params, grammar = seeded(temperature=temperature, max_tokens=40), Parity()
    prompts = prompts_of(flat, by_parity=True)
    plain = ids_of(run(start(flat, speculate=0), prompts, params, grammar=grammar))
    results = run(source.start(flat), prompts, source.asked(params), grammar=grammar)
    assert ids_of(results) == plain
    assert all(token % 2 == i % 2 for ids in plain for i, token in enumerate(ids))
    assert_alive(results, source)


def test_a_grammar_that_ends_inside_a_copy_ends_the_answer(flat: Path, source: Source) -> None:
    engine, plain = source.start(flat), start(flat, speculate=0)
    prompts, most = prompts_of(flat, by_parity=True), 0
    for limit in (1, 3, 6, 8):
        found, wanted = (
            run(each, prompts, params, grammar=Parity(limit))
            for each, params in ((engine, source.asked(greedy())), (plain, greedy()))
        )
        assert ids_of(found) == ids_of(wanted)
        ends = {(len(r.outputs[0].token_ids), r.outputs[0].finish_reason) for r in found}
        assert ends == {(limit, "stop")}
        most = max(most, *(k for r in found for k, _ in r.stats.rounds))
    assert most < 8, "behind its end nothing is verified"


def test_a_stop_inside_a_copy_ends_the_answer_there(flat: Path, source: Source) -> None:
    engine, plain = source.start(flat), start(flat, speculate=0)
    ended = set[str]()
    for prompt in prompts_of(flat):
        ((*_, token),) = ids_of(run(plain, [prompt], greedy(5)))
        for stop in ({"stop_token_ids": (token,)}, {"stop": (f" t{token}",)}):
            params = greedy(30, **stop)
            wanted, found = (
                run(each, [prompt], own)
                for each, own in ((plain, params), (engine, source.asked(params)))
            )
            assert texts_of(found) == texts_of(wanted)
            assert found[0].outputs[0].finish_reason == "stop"
            ended.add(found[0].outputs[0].origins[-1])
    assert "copied" in ended


def test_copies_take_no_notice_of_the_draft_vocabulary(flat: Path, source: Source) -> None:
    """The head drafts tokens of the map only, or own ones of the text; copies may be any."""
    params = greedy(60)
    plain = ids_of(run(start(flat, speculate=0), prompts_of(flat), params))
    for own in (0, 8):
        engine = source.start(flat, draft_vocab=[EVERY_THIRD], draft_vocab_own=own)
        results = run(engine, prompts_of(flat), source.asked(params))
        assert ids_of(results) == plain
        assert_alive(results, source)
        drafted = tokens_by_origin(results)
        assert not drafted["copied"] <= set(EVERY_THIRD.ids)
        if not own:
            assert drafted.get("accepted", set()) <= set(EVERY_THIRD.ids)


_CHOOSES_DRAFTS = ("speculate", "draft_vocab", "draft_from")


def of_example(fields: dict[str, Any]) -> SamplingParams:
    usual = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "seed": 5}
    return SamplingParams(**{**usual, **fields})


def test_every_sampling_setting_gives_the_text_without_drafts(flat: Path, source: Source) -> None:
    """But the rejection rule, whose text may depend on drafts: see test_engine_sampling.py."""
    examples = {names: own for names, own in EXAMPLES.items() if "acceptance" not in names}
    asked = {**examples, ("everything together",): TOGETHER}
    some = prompts_of(flat)[2:5]
    prompts = some * len(asked)
    plain, params = list[SamplingParams](), list[SamplingParams]()
    for fields in asked.values():
        without = {name: value for name, value in fields.items() if name not in _CHOOSES_DRAFTS}
        plain += [of_example(without)] * len(some)
        params += [source.asked(of_example(fields))] * len(some)
    wanted = run(start(flat, speculate=0, slots=8000), prompts, plain)
    found = run(source.start(flat, slots=8000, draft_vocab=[EVERY_THIRD]), prompts, params)
    were_right = 0
    for names in asked:
        own, found = found[: len(some)], found[len(some) :]
        other, wanted = wanted[: len(some)], wanted[len(some) :]
        assert texts_of(own) == texts_of(other), names
        may_copy = source.asked is by_copies or "speculate" not in names
        assert any(result.stats.copied_drafts for result in own) == may_copy, names
        were_right += any(result.stats.copied_accepted for result in own)
    assert were_right > len(asked) / 2


def texts_of(results: Sequence[Result]) -> list[Any]:
    """Tokens, text and how it ended, with log-probabilities of the answer and its prompt."""
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, rounded(one.logprobs),
         rounded(result.prompt_logprobs))
        for result in results for one in result.outputs
    ]  # fmt: skip


def rounded(told: Sequence[TokenLogprob] | None) -> list[Any]:
    return [(one.token, round(one.logprob, 6), list(one.top)) for one in told or ()]
