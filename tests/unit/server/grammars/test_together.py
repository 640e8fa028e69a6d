"""Grammars of a round that answer together: the same masks and the same ends as one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.grammar_walks import END, SPECIAL, VOCAB, ids, tokenizer

from headstart.engine.grammar import GuardedGrammar
from headstart.engine.mask_batch import MaskRows
from headstart.engine.round_grammars import RoundGrammars
from headstart.errors import RequestError
from headstart.sampling.masks import num_words
from headstart.server.grammars import token_grammar
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import json_object, regex
from headstart.server.grammars.token_grammar import TokenGrammar

SPECS = [regex("ab?"), regex(r"(.|\n)*"), regex("(ab|a[c-e]{2}){1,9}"), json_object()]
DRAFTS = 3
Asked = dict[int, tuple[GuardedGrammar, Sequence[int]]]


def rows_for(count: int, words: int = num_words(VOCAB)) -> MaskRows:
    """Rows that hold anything, as those of the round before."""
    draw = np.random.default_rng(0)
    size = count * (DRAFTS + 1), words
    return MaskRows(draw.integers(-(2**31), 2**31, size, np.int32))


def masks_of(
    masked: RoundGrammars, asked: Asked, words: int = num_words(VOCAB)
) -> dict[int, list[bytes]]:
    """By request, in the order of drafts before them."""
    rows = rows_for(len(asked), words)
    masked.begin({index: grammar for index, (grammar, _) in asked.items()}, rows)
    masks = masked.masks(asked, rows)
    found: dict[int, list[bytes]] = {index: [] for index in asked}
    for row, (index, depth) in enumerate(zip(masks.requests, masks.depths, strict=True)):
        assert depth == len(found[index])
        found[index].append(masks.words[row].tobytes())
    assert {i: masks.num_fitting(i) + 1 for i in asked} == {i: len(w) for i, w in found.items()}
    return found


def alone(asked: Asked, size: int = num_words(VOCAB)) -> dict[int, list[bytes]]:
    """What each says by itself, in so many words."""
    every = np.full(size, -1, np.int32)
    return {
        index: [
            (every if words is None else words[:size]).tobytes()
            for words in grammar.fork().words(drafts)
        ]
        for index, (grammar, drafts) in asked.items()
    }


def fitting(draw: random.Random, grammar: GuardedGrammar) -> int | None:
    """A token that may come next, often an end; None where there is none."""
    words = grammar.fork().words([])[0]
    if words is None:
        return draw.randrange(VOCAB)
    tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    if END in tokens and draw.random() < 0.2:
        return END
    return int(draw.choice(tokens)) if len(tokens) else None


def drafts_for(draw: random.Random, grammar: GuardedGrammar) -> list[int]:
    """Up to `DRAFTS`, most of which fit."""
    copy, found = grammar.fork(), list[int]()
    for _ in range(draw.randint(0, DRAFTS)):
        token = fitting(draw, copy)
        if token is None or draw.random() < 0.2:
            token = draw.choice([END, *range(len(SPECIAL)), *ids("ab{ "), VOCAB - 1])
        copy.accept(token)
        found.append(token)
    return found


def outcome(draw: random.Random, grammar: GuardedGrammar, drafts: Sequence[int]) -> list[int]:
    """What a round chose: some of the drafts that fit and a token that fits behind them, or -1."""
    copy, found = grammar.fork(), list[int]()
    for token in drafts[: min(copy.num_fitting(drafts), draw.randint(0, DRAFTS))]:
        copy.accept(token)
        found.append(token)
    if draw.random() < 0.1:  # an answer that is long enough
        return found
    token = fitting(draw, copy)
    return [*found, -1 if token is None else token]


@pytest.mark.parametrize("seed", range(4))
def test_rounds_have_the_masks_of_each_grammar_alone(
    seed: int, compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever was drafted and accepted; now and then each is asked by itself, or leaves."""
    draw, masked = random.Random(seed), RoundGrammars()
    grammars = [GuardedGrammar(compiler.compile(SPECS[i % len(SPECS)]), VOCAB) for i in range(12)]
    twins = [grammar.fork() for grammar in grammars]
    lengths = set()
    for number in range(25):
        masked._apart = number % 5 == 4
        here = draw.sample(range(len(grammars)), draw.randint(1, len(grammars)))
        asked = {i: (grammars[i], drafts_for(draw, twins[i])) for i in here}
        wanted = alone({i: (twins[i], drafts) for i, (_, drafts) in asked.items()})
        assert masks_of(masked, asked) == wanted
        lengths |= {len(own) for own in wanted.values()}
        chosen = {i: outcome(draw, twins[i], drafts) for i, (_, drafts) in asked.items()}
        found = masked.accept([(grammars[i], chosen[i]) for i in here])
        assert found == [twins[i].accept_all(chosen[i]) for i in here]
        other = draw.randrange(len(grammars))  # the host goes on with a request by itself
        given = drafts_for(draw, twins[other])
        assert alone({0: (grammars[other], given)}) == alone({0: (twins[other], given)})
    assert lengths == {1, 2, 3, 4}
    assert all(grammar.error is None for grammar in grammars)
    assert capfd.readouterr() == ("", ""), "xgrammar warns of tokens behind an end"


LARGE = 200  # tokens of a model, of which 102 are known


@pytest.fixture(scope="module")
def other_compiler() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(tokenizer(), LARGE, end_ids=[END])) as made:
        yield made


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("words", [4, 7])
def test_masks_are_as_wide_as_asked_for(
    words: int, is_apart: bool, other_compiler: GrammarCompiler
) -> None:
    """A room for the known tokens alone, and one for all."""
    grammars = [GuardedGrammar(other_compiler.compile(spec), LARGE) for spec in SPECS]
    assert {grammar.num_words for grammar in grammars} == {4} and num_words(LARGE) == 7
    masked, drafts = RoundGrammars(), [*ids("ab"), LARGE - 1]
    masked._apart = is_apart
    asked: Asked = {i: (grammar, drafts) for i, grammar in enumerate(grammars)}
    wanted = alone(asked, words)
    assert {len(own) for own in wanted.values()} == {1, 3}
    assert masks_of(masked, asked, words) == wanted


def together(
    compiler: GrammarCompiler, count: int = 4
) -> tuple[RoundGrammars, list[GuardedGrammar], Asked]:
    grammars = [GuardedGrammar(compiler.compile(SPECS[2]), VOCAB) for _ in range(count)]
    return RoundGrammars(), grammars, {i: (each, ids("aba")) for i, each in enumerate(grammars)}


def test_drafts_that_were_right_are_taken_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked, grammars, asked = together(compiler)
    masks_of(masked, asked)
    monkeypatch.delattr(TokenGrammar, "accept")  # nothing is asked one by one
    assert masked.accept([(grammar, ids("abac")) for grammar in grammars]) == [4] * 4
    assert masks_of(masked, {0: (grammars[0], ids("d"))}).keys() == {0}
    matcher = grammars[0]._grammar._matcher  # type: ignore[union-attr]
    matcher.rollback(5)  # four of the answer, one for now
    with pytest.raises(RuntimeError):
        matcher.rollback(1)


def test_a_grammar_that_has_used_up_its_time_ends_no_other(compiler: GrammarCompiler) -> None:
    """Nothing is charged together, so it goes on until it is asked by itself."""
    masked, grammars, asked = together(compiler)
    grammars[0]._grammar._allowance._left = -1.0  # type: ignore[union-attr]
    masks_of(masked, asked)
    given = [(grammars[0], [*ids("ab"), END]), *((each, ids("ab")) for each in grammars[1:])]
    assert masked.accept(given)[1:] == [2, 2, 2]
    assert [each.error for each in grammars[1:]] == [None] * 3
    with pytest.raises(RequestError, match="too long"):
        grammars[0]._grammar.allowed_words()  # type: ignore[union-attr]


def failing(*_: Any) -> Any:
    raise RuntimeError("no memory")


def test_where_one_call_for_masks_fails_each_is_asked_by_itself(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why, once: this goes on in every round."""
    masked, grammars, asked = together(compiler)
    wanted = alone(asked)
    monkeypatch.setattr(TokenGrammar, "fill", staticmethod(failing))
    for _ in range(3):
        assert masks_of(masked, asked) == wanted
    assert caplog.text.count("masks of 4 x TokenGrammar at once, behind 0 drafts, failed") == 1
    assert "RuntimeError: no memory" in caplog.text
    assert all(grammar.error is None for grammar in grammars)


def test_no_draft_counts_behind_masks_that_fail(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    masked, grammars, asked = together(compiler)
    wanted, calls = alone(asked), list[int]()
    fill = TokenGrammar.fill

    def second_fails(grammars: Sequence[TokenGrammar], out: np.ndarray, ahead: int) -> None:
        calls.append(len(grammars))
        if len(calls) == 2:
            failing()
        fill(grammars, out, ahead)

    monkeypatch.setattr(TokenGrammar, "fill", staticmethod(second_fails))
    assert masks_of(masked, asked) == {index: own[:1] for index, own in wanted.items()}
    assert "behind 1 drafts, failed" in caplog.text
    assert masked.accept([(grammar, ids("ac")) for grammar in grammars]) == [2] * 4
    assert [grammar.num_fitting(ids("db")) for grammar in grammars] == [1] * 4


def test_masks_that_take_long_end_before_the_drafts(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of all requests wait for them."""
    masked, grammars, asked = together(compiler)
    wanted = alone(asked)
    monkeypatch.setattr("headstart.engine.mask_batch._MOST_SECONDS", -1.0)
    assert masks_of(masked, asked) == {index: own[:1] for index, own in wanted.items()}
    monkeypatch.undo()
    assert masked.accept([(grammar, ids("a")) for grammar in grammars]) == [1] * 4
    asked = {i: (each, ids("ba")) for i, each in enumerate(grammars)}
    assert masks_of(masked, asked) == alone(asked)


@pytest.mark.parametrize(
    ("seconds", "depths"),
    [([0.01, 0.01, 0.01, 0.01], 4), ([0.01, 0.03, 0.03, 0.03], 2), ([0.06, 0.01], 1)],
    ids=["quick", "another one would end too late", "slow before there are drafts"],
)
def test_drafts_are_followed_as_long_as_the_next_one_should_end_in_time(
    seconds: list[float],
    depths: int,
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """50 ms for what comes behind drafts, by what the one before took."""
    masked, _, asked = together(compiler)
    wanted, clock, fill = alone(asked), 0.0, TokenGrammar.fill

    def timed(grammars: Sequence[TokenGrammar], out: np.ndarray, ahead: int) -> None:
        nonlocal clock
        clock += seconds[ahead]
        fill(grammars, out, ahead)

    monkeypatch.setattr(TokenGrammar, "fill", staticmethod(timed))
    clocks = SimpleNamespace(thread_time=lambda: clock)
    monkeypatch.setattr("headstart.engine.mask_batch.time", clocks)
    assert masks_of(masked, asked) == {index: own[:depths] for index, own in wanted.items()}


def test_grammars_of_two_compilers_are_asked_by_themselves(
    compiler: GrammarCompiler, other_compiler: GrammarCompiler
) -> None:
    pairs = (compiler, VOCAB), (other_compiler, LARGE)
    each = [GuardedGrammar(own.compile(SPECS[2]), size) for own, size in pairs]
    asked: Asked = {i: (grammar, ids("ab")) for i, grammar in enumerate(each)}
    assert masks_of(RoundGrammars(), asked) == alone(asked)


class NoSize(TokenGrammar):
    def num_words(self) -> int:
        raise RuntimeError("not known")


def test_a_grammar_that_does_not_know_its_size_ends_its_request(compiler: GrammarCompiler) -> None:
    inner = compiler.compile(SPECS[0])
    inner.__class__ = NoSize
    grammar = GuardedGrammar(inner, VOCAB)
    assert grammar.num_words == num_words(VOCAB)
    assert "num_words() failed: RuntimeError: not known" in str(grammar.error)


@pytest.mark.parametrize("method", ["look_ahead", "accept_each"])
def test_where_moving_together_fails_only_those_requests_end(
    method: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked, grammars, asked = together(compiler)
    monkeypatch.setattr(TokenGrammar, method, staticmethod(failing))
    found = masks_of(masked, asked)
    given = [(grammar, [*ids("ab"), -1]) for grammar in grammars]
    apart = GuardedGrammar(None, VOCAB)
    assert masked.accept([*given, (apart, [5])])[:4] == ([1] * 4)
    assert all(own[0] for own in found.values())
    assert all(f"{method}() failed: RuntimeError" in str(each.error) for each in grammars)
    assert apart.error is None


class OtherBatch:
    """Calls for many matchers that take other arguments."""

    def batch_accept_token(self, requests: Any) -> Any:
        return failing()

    batch_fill_next_token_bitmask = batch_rollback = batch_accept_token


@pytest.mark.parametrize("way", ["nothing", "other arguments", "masks alone"])
def test_where_xgrammar_has_no_such_calls_for_many_each_moves_on_by_itself(
    way: str,
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are not its public interface; the log says so once."""
    masked, grammars, asked = together(compiler)
    wanted, real = alone(asked), token_grammar._batch()
    filling = SimpleNamespace(batch_fill_next_token_bitmask=real.batch_fill_next_token_bitmask)
    other = {"nothing": SimpleNamespace(), "other arguments": OtherBatch(), "masks alone": filling}
    monkeypatch.setattr(token_grammar, "_batch", lambda: other[way])
    token_grammar._warn.cache_clear()
    assert masks_of(masked, asked) == wanted
    assert masked.accept([(grammar, ids("ac")) for grammar in grammars]) == [2] * 4
    behind = {i: (each, ids("ab")) for i, each in enumerate(grammars)}
    assert masks_of(masked, behind) == alone(behind) != wanted
    assert masked.accept([(each, ids("a")) for each in grammars]) == [1] * 4
    assert all(grammar.error is None for grammar in grammars)
    assert caplog.text.count("matchers of this xgrammar move on one by one") == 1


def test_after_slow_rounds_grammars_are_asked_one_by_one_for_more_and_more(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the one that takes long is charged for it; a quick round ends that."""
    masked, _, asked = together(compiler, count=1)
    monkeypatch.setattr("headstart.engine.round_grammars._LITTLE_EACH", 0.0)
    together_in: list[int] = []
    number, fill = 0, TokenGrammar.fill

    def watched(grammars: Sequence[TokenGrammar], out: np.ndarray, ahead: int) -> None:
        if ahead == 0:
            together_in.append(number)
        fill(grammars, out, ahead)

    def slow_until(quick: int, stop: int) -> list[int]:
        """How many rounds lie between those in which all answered together."""
        nonlocal number
        together_in.clear()
        for number in range(stop):
            little = 1e9 if number >= quick else 0.0
            monkeypatch.setattr("headstart.engine.round_grammars._LITTLE", little)
            masks_of(masked, asked)
        return [b - a - 1 for a, b in pairwise(together_in)]

    monkeypatch.setattr(TokenGrammar, "fill", staticmethod(watched))
    assert slow_until(1600, 1600) == [16, 32, 64, 128, 256, 512, 512]
    masked._apart = 0
    assert slow_until(1, 520) == [512, 0, 0, 0, 0, 0, 0]
    assert slow_until(1, 20) == [16, 0, 0]
