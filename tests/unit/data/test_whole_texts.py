"""Texts of tokens that are whole characters: the same as by decoding, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from headstart.data.detokenizer import Detokenizer

WORDS = ["Ġthe", "Ġa", "Ċ", "Ġcaf", "Ã©", "ãģĤ", "ãģ", "ï¿½"]  # whole, half and broken ones


def tokenizer(*, is_plain: bool = True) -> PreTrainedTokenizerFast:
    """Tokens 0 to 255 are bytes, then words, then one special token."""
    letters = sorted(ByteLevel.alphabet())
    inner = Tokenizer(BPE({text: i for i, text in enumerate([*letters, *WORDS])}, []))
    inner.decoder = ByteLevelDecoder() if is_plain else Decoders([ByteLevelDecoder()])
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def played(text: Detokenizer, chunks: Sequence[Sequence[int]], *, at_once: bool) -> list[str]:
    """What is shown after each chunk, and at the end."""
    shown = []
    for chunk in chunks:
        if at_once:
            assert text.add_all(chunk) == len(chunk)
        else:
            for token in chunk:
                text.add(token)
        shown.append(text.take(is_last=False))
    text.finish()
    return [*shown, text.take(is_last=True), text.text]


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("is_plain", [True, False])
def test_chunks_show_what_their_tokens_show_one_by_one(
    *, skip_special: bool, is_plain: bool
) -> None:
    own, draw = tokenizer(is_plain=is_plain), random.Random(0)
    most = len(own)
    usual, seen = [*range(256, most), *own.convert_tokens_to_ids(["a", "b"])], set[str]()
    for _ in range(300):
        chunks = [
            [draw.choice(usual) if draw.random() < 0.9 else draw.randrange(most)
             for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(1, 12))
        ]  # fmt: skip
        new = [Detokenizer(own, (), skip_special=skip_special, keep_stop=False) for _ in range(2)]
        wanted = played(new[0], chunks, at_once=False)
        assert played(new[1], chunks, at_once=True) == wanted
        seen |= {text for text in ("é", "あ", "\ufffd", "<end>") if text in wanted[-1]}
    assert seen == {"é", "あ", "\ufffd"} | (set() if skip_special else {"<end>"})


def watched(text: Detokenizer) -> list[list[int]]:
    """What it asks its tokenizer from now on."""
    asked, decoded = list[list[int]](), text._decoded

    def watch(tokens: list[int], *, skip_special_tokens: bool) -> str:
        asked.append(tokens)
        return str(decoded(tokens, skip_special_tokens=skip_special_tokens))

    text._decoded = watch
    return asked


def test_whole_tokens_are_decoded_once() -> None:
    """For all answers; a decoder of another kind is asked every time."""
    own, words = tokenizer(), [256, 257, 256]
    first, second, other = (
        Detokenizer(each, (), skip_special=True, keep_stop=False)
        for each in (own, own, tokenizer(is_plain=False))
    )
    first.add_all(words)
    for text in (second, other):
        asked = watched(text)
        text.add_all(words)
        assert text.text == first.text == " the a the"
        assert bool(asked) == (text is other)
