"""Tokens of a verdict are taken one by one, or as if they were, until something ends the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.data.detokenizer import Decoder, Detokenizer
from headstart.engine import output
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.output import emit, update_since
from headstart.engine.request import Request, origins
from headstart.engine.verifier import Verdict
from headstart.sampling.choose import NOTHING_ALLOWED, TokenLogprob
from headstart.sampling.params import SamplingParams

VOCAB, END = 128, 0


class Characters:
    """Token i is the character i; the end is nothing."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if token != END)


class Allowing:
    """A grammar that allows some tokens always, and breaks at one of them."""

    def __init__(self, *tokens: int, breaks_at: int | None = None):
        self._tokens, self._breaks_at = tokens, breaks_at

    def allowed(self) -> torch.Tensor:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[list(self._tokens)] = True
        return mask

    def accept(self, token: int) -> bool:
        if token == self._breaks_at:
            raise ValueError("lost its way")
        return True

    def fork(self) -> Allowing:
        return Allowing(*self._tokens, breaks_at=self._breaks_at)


class Pieces:
    """As a byte-level tokenizer: a token is some bytes, maybe half a character; one has none."""

    decoder = "ByteLevel()"
    pieces = (b"", b" the", b"a", b"\n", b"\xc3\xa9", b"\xa9", b"\xe3\x81", b"\x82")

    @property
    def backend_tokenizer(self) -> Pieces:
        return self

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


NO_PIECE = len(Pieces.pieces)


def request(max_tokens: int = 50, tokenizer: Decoder | None = None, **settings: Any) -> Request:
    params = SamplingParams(temperature=0, **settings)
    own = Request("g/0", [1, 2], params, 0, max_tokens, frozenset({END}), 0, group="g")
    own.text = Detokenizer(
        tokenizer or Characters(), params.stop, skip_special=True,
        keep_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens,
    )  # fmt: skip
    return own


def verdict(tokens: str | list[int], *, logprobs: bool = False) -> Verdict:
    ids = [ord(char) for char in tokens] if isinstance(tokens, str) else tokens
    found = [TokenLogprob(token, -float(token), {}) for token in ids] if logprobs else []
    return Verdict(ids, list(origins(len(ids) - 1, len(ids) - 1)), len(ids) - 1, len(ids), found)


def shown(own: Request) -> str:
    return "".join(map(chr, own.output_ids))


def test_an_answer_goes_on_while_nothing_ends_it() -> None:
    own = request()
    emit(own, verdict("ab"))
    assert (shown(own), own.finish_reason, own.origins) == ("ab", None, ["accepted", "bonus"])


def test_tokens_behind_an_end_token_are_dropped() -> None:
    own = request()
    emit(own, verdict([ord("a"), END, ord("b")], logprobs=True))
    assert own.output_ids == [ord("a"), END]
    assert (own.finish_reason, own.stop_reason) == ("stop", END)
    assert own.origins == ["accepted", "accepted"]
    assert [told.token for told in own.logprobs] == [ord("a"), END]
    assert own.text is not None and own.text.text == "a"


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    own = request(stop=("bc",))
    emit(own, verdict("abcd"))
    assert (shown(own), own.finish_reason, own.stop_reason) == ("abc", "stop", "bc")
    assert own.text is not None and own.text.text == "a"


def test_an_answer_ends_at_the_same_token_alone_and_in_a_chunk() -> None:
    for chunk in ("abcd", "ab", "a"):
        own, rest = request(stop=("bc",)), "abcdefgh"
        while own.finish_reason is None:
            emit(own, verdict(rest[own.num_output :][: len(chunk)]))
        assert (shown(own), own.stop_reason) == ("abc", "bc")


def turn(own: Request, tokens: list[int], *, is_accepted: bool) -> tuple[Any, ...]:
    """What a verdict of these adds; is_accepted: by the grammar, before they are emitted."""
    given, before = verdict(tokens, logprobs=True), own.num_output
    if is_accepted and own.grammar is not None:
        given = replace(given, grammar_tokens=own.grammar.accept_all(tokens))
    emit(own, given)
    assert own.text is not None
    return update_since(own, before), own.text.text, own.tokens


def test_a_chunk_at_once_is_what_its_tokens_are_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever ends the answer: an end, a stop string, its length, its grammar, its tokenizer."""
    draw, tokenizer, takes_all = random.Random(5), Pieces(), output._takes_all
    at_once, ends = list[bool](), set[tuple[str, bool]]()

    def watched(own: Request, given: Verdict) -> bool:
        at_once.append(takes_all(own, given))
        return at_once[-1]

    while len(at_once) < 200:
        settings: dict[str, Any] = {
            "max_tokens": draw.choice([3, 12, 40]), "min_tokens": draw.choice([0, 0, 3]),
            "stop": draw.choice([(), (), (), ("aa",), ("\u3042",)]),
        }  # fmt: skip
        breaks_at, has_grammar = draw.choice([None, 3]), draw.random() < 0.3
        pair = [request(tokenizer=tokenizer, **settings) for _ in range(2)]
        for own in pair if has_grammar else ():
            own.grammar = GuardedGrammar(Allowing(*range(8), breaks_at=breaks_at), VOCAB)
        while pair[0].finish_reason is None:
            tokens = [draw.randint(1, NO_PIECE - 1) for _ in range(draw.randint(1, 4))]
            if draw.random() < 0.1:
                tokens[draw.randrange(len(tokens))] = draw.choice([END, NO_PIECE, NOTHING_ALLOWED])
            is_accepted, found = draw.random() < 0.7, list[tuple[Any, ...]]()
            for own, way in zip(pair, (watched, lambda *_: False), strict=True):
                monkeypatch.setattr(output, "_takes_all", way)
                found.append(turn(own, tokens, is_accepted=is_accepted))
            assert found[0] == found[1], (tokens, settings, breaks_at, has_grammar)
        ends.add((str(pair[0].finish_reason), at_once[-1]))
    assert 50 < sum(at_once) < 150
    assert ends == {("stop", False), ("length", False), ("error", False), ("error", True)}


def test_tokens_behind_one_without_a_text_are_dropped() -> None:
    own = request(tokenizer=Pieces())
    emit(own, verdict([2, NO_PIECE, 2], logprobs=True))
    update = update_since(own, 0)
    assert (update.token_ids, update.text, update.finish_reason) == ([2, NO_PIECE], "a", "error")
    assert len(update.logprobs) == len(update.origins) == 2
    assert update.error is not None and "the tokenizer of the model fails" in update.error


def test_a_stop_string_may_stay_in_the_text() -> None:
    own = request(stop=("bc",), include_stop_str_in_output=True)
    emit(own, verdict("abcd"))
    assert own.text is not None and own.text.text == "abc"


def test_an_answer_ends_at_its_length() -> None:
    own = request(max_tokens=3)
    emit(own, verdict("abcd"))
    assert (shown(own), own.finish_reason, own.stop_reason) == ("abc", "length", None)
    assert own.text is not None and own.text.text == "abc"


def test_the_last_token_that_fits_may_be_an_end() -> None:
    own = request(max_tokens=2)
    emit(own, verdict([ord("a"), END]))
    assert (own.finish_reason, own.stop_reason) == ("stop", END)


@pytest.mark.parametrize(("least", "count"), [(0, 2), (2, 3), (5, 4)])
def test_no_end_token_counts_before_enough_tokens(least: int, count: int) -> None:
    own = request(min_tokens=least)
    emit(own, verdict([ord("a"), END, END, END]))
    assert own.num_output == count
    assert own.finish_reason == ("stop" if least < count else None)


def test_no_stop_string_counts_before_enough_tokens() -> None:
    own = request(min_tokens=2, stop=("b",))
    emit(own, verdict("abab"))
    assert (shown(own), own.stop_reason) == ("abab", "b")


def test_a_grammar_that_fails_ends_its_request() -> None:
    own = request()
    own.grammar = GuardedGrammar(Allowing(97, 98, breaks_at=98), VOCAB)
    emit(own, verdict("abc"))
    assert (shown(own), own.finish_reason) == ("ab", "error")
    assert own.error is not None and "ValueError: lost its way" in own.error


def test_tokens_that_a_grammar_accepted_before_end_the_answer_where_it_failed() -> None:
    own = request()
    own.grammar = GuardedGrammar(Allowing(97, 98, breaks_at=98), VOCAB)
    given = verdict("abc")
    emit(own, replace(given, grammar_tokens=own.grammar.accept_all(given.tokens)))
    assert shown(own) == "ab" and own.finish_reason == "error", "c came behind the failure"


def test_where_a_grammar_is_at_its_end_the_answer_is_whole() -> None:
    own = request()
    own.grammar = GuardedGrammar(Allowing(), VOCAB)
    emit(own, verdict([97, NOTHING_ALLOWED, 98]))
    assert (shown(own), own.finish_reason, own.error) == ("a", "stop", None)
    assert own.origins == ["accepted"]


@pytest.mark.parametrize(
    ("grammar", "reason", "error"),
    [
        (Allowing(97), "error", "forbid all that the grammar allows"),
        (None, "error", "forbid all that the model allows"),
        (Allowing(97, END), "stop", None),
    ],
    ids=["grammar", "no grammar", "it may end"],
)
def test_where_other_settings_leave_nothing_over_the_request_says_so(
    grammar: Allowing | None, reason: str, error: str | None
) -> None:
    own = request()
    own.grammar = GuardedGrammar(grammar, VOCAB) if grammar is not None else None
    emit(own, verdict([NOTHING_ALLOWED]))
    assert (own.finish_reason, own.output_ids) == (reason, [])
    assert own.error is None if error is None else error in str(own.error)


def test_an_update_tells_what_was_added() -> None:
    own = request(stop=("xyz",))
    emit(own, verdict("ab", logprobs=True))
    first = update_since(own, 0)
    assert (first.request_id, first.sample, first.text) == ("g", 0, "ab")
    assert (first.finish_reason, first.origins) == (None, ["accepted", "bonus"])
    emit(own, verdict("cx", logprobs=True))
    second = update_since(own, 2)
    assert second.token_ids == [ord("c"), ord("x")] and len(second.logprobs) == 2
    assert second.text == "c", "an x may be the beginning of a stop string"
    emit(own, verdict([END]))
    last = update_since(own, 4)
    assert (last.text, last.finish_reason, last.stop_reason) == ("x", "stop", END)


@pytest.mark.parametrize(
    ("num_accepted", "num_drafts", "expected"),
    [
        (0, 0, ("bonus",)),
        (0, 2, ("recovered",)),
        (1, 2, ("accepted", "recovered")),
        (2, 2, ("accepted", "accepted", "bonus")),
    ],
)
def test_origins(num_accepted: int, num_drafts: int, expected: tuple[str, ...]) -> None:
    assert origins(num_accepted, num_drafts) == expected
