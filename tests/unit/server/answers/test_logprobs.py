"""Log-probabilities in both shapes, with tokens that end inside a character."""

from __future__ import annotations

import json
import math
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.sampling.choose import TokenLogprob
from headstart.server.answers.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from headstart.server.pieces import Pieces
from headstart.server.wire import encoded

WORDS = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120on", "ab"]


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(WORDS)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return Pieces(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>"))


def begin_of(text: bytes, at: int) -> int:
    """Characters before the one that the byte `at` belongs to; broken bytes are one mark each."""
    before = text[:at].decode("utf-8", "replace")
    is_inside = at < len(text) and (text[at] & 0xC0) == 0x80
    return len(before) - 1 if is_inside and before else len(before)


def test_offsets_are_those_of_the_characters_that_tokens_begin_with(pieces: Pieces) -> None:
    draw = random.Random(0)
    for _ in range(50):
        text = "".join(draw.choices(["a", "b", " ", "\u00e4", "\u20ac", "\U0001f600"], k=12))
        ids = [*pieces._tokenizer.encode(text), 0]
        offsets, found, at = TextOffsets(pieces, skip_special=True), [], 0
        for token in ids[:-1]:
            found.append((offsets.add(token), begin_of(text.encode(), at)))
            at += len(pieces.bytes_of(token))
        assert all(begin == wanted for begin, wanted in found)
        assert offsets.add(ids[-1]) == len(text), "a special token is not in the text"


def test_both_shapes_hold_what_is_told(pieces: Pieces) -> None:
    euro = pieces._tokenizer.encode("\u20ac")
    on = WORDS.index("\u0120on")
    told = [
        TokenLogprob(on, -0.5, {on: -0.5, euro[0]: -1e-7}),
        TokenLogprob(euro[0], -math.inf, {}),
    ]
    chat = json.loads(encoded(chat_logprobs(told, pieces)))["content"]
    assert chat[0] == {
        "token": " on", "logprob": -0.5, "bytes": [32, 111, 110],
        "top_logprobs": [
            {"token": " on", "logprob": -0.5, "bytes": [32, 111, 110]},
            {"token": "\ufffd", "logprob": -1e-7, "bytes": [226]},
        ],
    }  # fmt: skip
    assert (chat[1]["logprob"], chat[1]["top_logprobs"]) == (-9999.0, [])
    found = completion_logprobs(told, pieces, TextOffsets(pieces, skip_special=True))
    assert json.loads(encoded(found)) == {
        "tokens": [" on", "bytes:\\xe2"], "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{" on": -0.5, "bytes:\\xe2": -1e-7}, {"bytes:\\xe2": -9999.0}],
        "text_offset": [0, 3],
    }  # fmt: skip


def test_alternatives_of_one_text_are_told_apart_by_their_ids(pieces: Pieces) -> None:
    unknown = len(WORDS) + 7, len(WORDS) + 9  # neither has a text
    told = [TokenLogprob(5, -1.0, {5: -1.0, unknown[0]: -2.0, unknown[1]: -3.0})]
    offsets = TextOffsets(pieces, skip_special=True)
    shown = completion_logprobs(told, pieces, offsets)["top_logprobs"][0]
    assert list(shown.values()) == [-1.0, -2.0, -3.0]
    assert list(shown)[1:] == ["", f"token_id:{unknown[1]}"]
