"""Masks of a whole chain of drafts at once, and of many requests side by side."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.grammar_walks import END, SPECIAL, VOCAB, ids

from headstart.engine.grammar import GuardedGrammar
from headstart.engine.mask_threads import MaskThreads
from headstart.errors import RequestError
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import GrammarSpec, json_object, regex
from headstart.server.grammars.token_grammar import TokenGrammar

SPECS = {
    "ends": regex("ab?"), "anything": regex(r"(.|\n)*"), "long": regex("(ab|a[c-e]{2}){1,9}"),
    "json": json_object(),
}  # fmt: skip


class Plain:
    """The same grammar through the three methods that every grammar has."""

    def __init__(self, grammar: TokenGrammar):
        self._grammar = grammar

    def allowed(self) -> torch.Tensor | None:
        return self._grammar.allowed()

    def accept(self, token: int) -> bool:
        return self._grammar.accept(token)

    def fork(self) -> Plain:
        return Plain(self._grammar.fork())


def drafts_of(draw: random.Random, spec: GrammarSpec) -> list[int]:
    """Some that fit for a while, special tokens and unknown ones among them."""
    near = ids({"JSON object": '{"a": 1}'}.get(spec.what, "abacde"))
    count = draw.randint(1, 5)
    chain = near[:count] if draw.random() < 0.5 else draw.choices(near, k=count)
    if draw.random() < 0.5:
        chain[draw.randrange(count)] = draw.choice([END, *range(len(SPECIAL)), VOCAB - 1])
    return chain


def shown(masks: Sequence[np.ndarray | None]) -> list[bytes | None]:
    return [None if words is None else words.tobytes() for words in masks]


@pytest.mark.parametrize("name", SPECS)
def test_a_chain_has_the_masks_of_copies_that_go_on_by_themselves(
    name: str, compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    draw, grammar = random.Random(name), compiler.compile(SPECS[name])
    lengths = set()
    for _ in range(60):
        drafts = drafts_of(draw, SPECS[name])
        found = GuardedGrammar(grammar, VOCAB).words(drafts)
        wanted = GuardedGrammar(Plain(grammar.fork()), VOCAB).words(drafts)
        assert shown(found) == shown(wanted), drafts
        lengths.add(len(found))
    assert len(lengths) > 1
    assert capfd.readouterr() == ("", "")


def test_masks_of_a_chain_are_kept_and_continued(compiler: GrammarCompiler) -> None:
    guarded = GuardedGrammar(compiler.compile(SPECS["long"]), VOCAB)
    a, b, c = (ids(char)[0] for char in "abc")
    assert guarded.is_threaded
    first = guarded.words([a, b])
    assert shown(guarded.words([a, b, a])[:3]) == shown(first)
    assert guarded.accept(a) and shown(guarded.words([b])) == shown(first[1:])
    assert guarded.accept(b) and len(guarded.words([c])) == 1, "no word begins with it"


def test_a_chain_that_takes_too_long_fails_where_the_answer_does(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = compiler.compile(SPECS["anything"])
    monkeypatch.setattr(grammar._allowance, "_left", -1.0)
    with pytest.raises(RequestError, match="takes too long to follow"):
        grammar.chain_words(ids("ab"))
    guarded = GuardedGrammar(grammar, VOCAB)
    assert not any(words.any() for words in guarded.words(ids("ab")) if words is not None)
    assert guarded.error is not None and "takes too long to follow" in guarded.error


def test_threads_give_each_request_its_own_masks(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    together = threading.Barrier(3, timeout=20)  # none goes on before three threads are at work
    words = GuardedGrammar.words

    def watched(grammar: GuardedGrammar, drafts: Sequence[int]) -> list[np.ndarray | None]:
        if threading.current_thread().name not in names:
            names.add(threading.current_thread().name)
            together.wait()
        return words(grammar, drafts)

    draw, threads = random.Random(0), MaskThreads()
    asked, wanted = [], []
    for number in range(24):
        spec = list(SPECS.values())[number % len(SPECS)]
        drafts, grammar = drafts_of(draw, spec), compiler.compile(spec)
        wanted.append(shown(words(GuardedGrammar(Plain(grammar.fork()), VOCAB), drafts)))
        asked.append((GuardedGrammar(grammar if number % 5 else Plain(grammar), VOCAB), drafts))
    monkeypatch.setattr(threads, "_helpers", 2)
    monkeypatch.setattr(threads, "_seconds", 1.0)
    monkeypatch.setattr(GuardedGrammar, "words", watched)
    assert [shown(masks) for masks in threads.words(asked)] == wanted
    assert len(names) == 3
    assert threads.words([]) == []


def test_threads_begin_with_what_may_come_next_before_there_are_drafts(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it takes long, and once: drafts only add what follows them."""
    filled: list[str] = []
    fill = TokenGrammar.allowed_words

    def watched(grammar: TokenGrammar) -> np.ndarray | None:
        filled.append(threading.current_thread().name)
        return fill(grammar)

    monkeypatch.setattr(TokenGrammar, "allowed_words", watched)
    threads, guarded = MaskThreads(), GuardedGrammar(compiler.compile(SPECS["ends"]), VOCAB)
    monkeypatch.setattr(threads, "_helpers", 1)
    threads.begin([guarded])
    assert threads.finish() == 0 and not filled, "one quick mask is not worth a thread"
    monkeypatch.setattr(threads, "_seconds", 1.0)
    threads.begin([guarded])
    a, b = (ids(char)[0] for char in "ab")
    (masks,) = threads.words([(guarded, [b, a])])
    assert len(masks) == 1 and len(filled) == 1, "the first draft does not fit"
    assert shown(masks) == shown([fill(compiler.compile(SPECS["ends"]))])


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_chain_goes_on_from_a_first_mask(
    is_quick: bool, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once where masks are quick, else by a copy that need not compute the first again."""
    monkeypatch.setattr("headstart.engine.grammar._QUICK", 1e9 if is_quick else 0.0)
    chains: list[int] = []
    chain = TokenGrammar.chain_words

    def watched(grammar: TokenGrammar, drafts: Sequence[int]) -> list[np.ndarray | None]:
        chains.append(len(drafts))
        return chain(grammar, drafts)

    monkeypatch.setattr(TokenGrammar, "chain_words", watched)
    grammar, drafts = compiler.compile(SPECS["long"]), ids("aba")
    guarded = GuardedGrammar(grammar, VOCAB)
    first = guarded.words([])
    found = guarded.words(drafts)
    assert shown(found[:1]) == shown(first) and len(found) == 4
    wanted = GuardedGrammar(Plain(compiler.compile(SPECS["long"])), VOCAB).words(drafts)
    assert shown(found) == shown(wanted)
    assert chains == ([3] if is_quick else [])
