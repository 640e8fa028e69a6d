"""Text while it arrives: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from headstart.data.detokenizer import Detokenizer

SPECIAL = 256


class ByteTokenizer:
    """Token i is byte i; 256 is special."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token in [*tokens, SPECIAL]:
            if token == SPECIAL:
                parts += [bytes(run).decode("utf-8", errors="replace"), "<end>"]
                run = []
            else:
                run.append(token)
        parts.pop()
        return "".join(part for part in parts if not (skip_special_tokens and part == "<end>"))


class PieceTokenizer:
    """Token i is the i-th piece of text."""

    def __init__(self, pieces: Sequence[str]):
        self.pieces = pieces

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.pieces[token] for token in tokens)


def detokenizer(stops: Sequence[str] = (), **options: bool) -> Detokenizer:
    settings = {"skip_special": True, "keep_stop": False, **options}
    return Detokenizer(ByteTokenizer(), stops, **settings)


def play(text: Detokenizer, tokens: Sequence[int], chunks: Sequence[int]) -> tuple[str, list[str]]:
    """Feed tokens, several at a time as rounds do; returns the stop string and what was shown."""
    shown, stopped, at = [], None, 0
    sizes = iter([*chunks, *[1] * len(tokens)])
    while at < len(tokens) and stopped is None:
        for token in tokens[at : at + next(sizes)]:
            at += 1
            stopped = text.add(token)
            if stopped is not None:
                break
        if at >= len(tokens) and stopped is None:
            text.finish()
        shown.append(text.take(is_last=at >= len(tokens) or stopped is not None))
    return stopped or "", shown


CHUNKS = st.lists(st.integers(1, 6), max_size=20)
# few characters, so that stop strings occur, of one to four bytes, so that tokens split them
TEXTS = st.text(st.sampled_from("ab\u00e9\u4f60\U0001f600 "), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab\u00e9\u4f60"), min_size=1, max_size=4), max_size=3)


@given(TEXTS, CHUNKS)
def test_characters_are_never_shown_in_part(written: str, chunks: list[int]) -> None:
    text = detokenizer()
    _, shown = play(text, list(written.encode()), chunks)
    assert "".join(shown) == written == text.text
    assert not any("\ufffd" in part for part in shown)


@given(TEXTS, STOPS, CHUNKS, st.booleans())
def test_a_text_is_cut_at_its_first_stop_string_and_nothing_of_it_is_shown_before(
    written: str, stops: list[str], chunks: list[int], keep: bool
) -> None:
    text = detokenizer(stops, keep_stop=keep)
    stopped, shown = play(text, list(written.encode()), chunks)
    ends = [(written.find(s) + len(s), -len(s), s) for s in stops if s in written]
    if not ends:
        assert (stopped, "".join(shown)) == ("", written)
        return
    end, _, expected = min(ends)
    cut = end if keep else end - len(expected)
    assert stopped == expected
    assert "".join(shown) == text.text == written[:cut]


@given(TEXTS, STOPS)
def test_what_may_become_a_stop_string_is_held_back(written: str, stops: list[str]) -> None:
    text = detokenizer(stops)
    shown = ""
    for token in written.encode():
        if text.add(token) is not None:
            break
        shown += text.take(is_last=False)
        held = len(text.text) - len(shown)
        begun = [n for s in stops for n in range(1, len(s)) if text.text.endswith(s[:n])]
        assert held == max(begun, default=0)


@given(st.lists(st.integers(0, 255), max_size=12), CHUNKS)
def test_bytes_that_are_no_text_are_shown_as_the_tokenizer_decodes_them_in_the_end(
    tokens: list[int], chunks: list[int]
) -> None:
    text = detokenizer()
    _, shown = play(text, tokens, chunks)
    assert "".join(shown) == text.text
    assert text.text.replace("\ufffd", "") == bytes(tokens).decode(errors="ignore")


def test_the_stop_string_that_completes_first_counts_even_within_one_token() -> None:
    """Regression: the one that began first was taken, though the other had ended before."""
    for pieces in (["abcd"], ["a", "b", "c", "d"]):
        text = Detokenizer(
            PieceTokenizer(pieces), ["abcd", "bc"], skip_special=True, keep_stop=False
        )
        assert next(stop for token in range(len(pieces)) if (stop := text.add(token))) == "bc"
        assert text.text == "a"


def test_a_stop_string_over_several_tokens_is_found() -> None:
    text = Detokenizer(
        PieceTokenizer(["x st", "o", "p y"]), ["stop"], skip_special=True, keep_stop=False
    )
    assert [text.add(0), text.add(1)] == [None, None]
    assert text.take(is_last=False) == "x "
    assert text.add(2) == "stop"
    assert text.take(is_last=True) == ""
    assert text.text == "x "


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    pieces = ["stop ", "a st", "op", " b", " stop", "c"]
    text = Detokenizer(
        PieceTokenizer(pieces), ["stop"], skip_special=True, keep_stop=False, min_tokens=2
    )
    # The one that begins within the first two tokens and ends after them counts.
    assert [text.add(token) for token in range(3)] == [None, None, "stop"]
    assert text.text == "stop a "
    late = Detokenizer(
        PieceTokenizer(pieces), ["stop"], skip_special=True, keep_stop=False, min_tokens=3
    )
    assert [late.add(token) for token in range(5)] == [None, None, None, None, "stop"]
    assert late.text == "stop a stop b "


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_left_out_on_request(skip: bool, expected: str) -> None:
    text = detokenizer(skip_special=skip)
    play(text, [97, SPECIAL, 98], [])
    assert text.text == expected


def test_a_real_tokenizer_gives_what_it_decodes_at_once() -> None:
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    inner = Tokenizer(BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    written = "Straße 你好 😀 a ! b"
    ids = tokenizer.encode(written)
    assert len(ids) == len(written.encode())  # characters in pieces
    text = Detokenizer(tokenizer, (), skip_special=True, keep_stop=False)
    play(text, ids, [])
    assert text.text == written == tokenizer.decode(ids)


def test_a_broken_end_is_shown_when_no_more_tokens_come() -> None:
    text = detokenizer()
    _, shown = play(text, [97, *"\u4f60".encode()[:2]], [])
    assert shown == ["a", "", "\ufffd"]
