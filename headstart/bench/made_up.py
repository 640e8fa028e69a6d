"""Prompts without a file: everyday words, as many as a length asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

# Short and common, so that most tokenizers have each as one token.
_TEXT = """
the of and to in is that for it as was with be by on not he this are or his from at which but have
an had they you were their one all we can her has there been if more when will would who so no time
out up into them some could people only other new its then two may these like any first work now
such make over our even most me state after also made many did must before back see through way
where get much go well your know should down year because come just say each those take day good
how long too little use very still great world hand high home
"""
WORDS: Sequence[str] = tuple(_TEXT.split())
_MOST_TRIES = 8
_NUM_COMPARED = 16
_ENOUGH_WORDS, _MOST_IDS = 128, 512


def made_up_text(
    draw: random.Random,
    num_tokens: int,
    count_tokens: Callable[[str], int] | None,
    all_words: Sequence[str] = WORDS,
) -> str:
    """Without a tokenizer a word is taken for a token; with one the length is met where the words
    allow it, and fallen short of by a token or two where they do not."""
    words = [draw.choice(all_words) for _ in range(num_tokens)]
    if count_tokens is None:
        return " ".join(words)
    for _ in range(_MOST_TRIES):
        found = count_tokens(" ".join(words))
        if found == num_tokens:
            break
        if found < num_tokens:
            words += [draw.choice(all_words) for _ in range(num_tokens - found)]
        else:
            words = words[: max(1, len(words) * num_tokens // found)]
    return " ".join(words)


def words_known(
    encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str | None]
) -> Sequence[str]:
    """Everyday words; for a tokenizer that reads them all as the same unknown one, words of its
    own, since prompts of one token only are nothing like prompts (and all in a prefix cache)."""
    if _differ(WORDS, encode):
        return WORDS
    found: dict[str, None] = {}
    for token in range(_MOST_IDS):
        text = decode([token])
        if text is None or len(found) == _ENOUGH_WORDS:
            break
        word = text.strip()
        if word.isalnum():  # no special tokens, no halves of characters
            found[word] = None
    own = tuple(found)
    return own if _differ(own, encode) else WORDS


def _differ(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> bool:
    some = words[:_NUM_COMPARED]
    return len({tuple(encode(word)) for word in some}) > len(some) // 2
