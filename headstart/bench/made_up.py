"""Prompts without a file: everyday words, as many as a length asks for."""

from __future__ import annotations

import random
from collections.abc import Callable

# Short and common, so that most tokenizers have each as one token.
_TEXT = """
the of and to in is that for it as was with be by on not he this are or his from at which but have
an had they you were their one all we can her has there been if more when will would who so no time
out up into them some could people only other new its then two may these like any first work now
such make over our even most me state after also made many did must before back see through way
where get much go well your know should down year because come just say each those take day good
how long too little use very still great world hand high home
"""
_WORDS = _TEXT.split()
_MOST_TRIES = 8


def made_up_text(
    draw: random.Random, num_tokens: int, count_tokens: Callable[[str], int] | None
) -> str:
    """Without a tokenizer a word is taken for a token; with one the length is met where the words
    allow it, and fallen short of by a token or two where they do not."""
    words = [draw.choice(_WORDS) for _ in range(num_tokens)]
    if count_tokens is None:
        return " ".join(words)
    for _ in range(_MOST_TRIES):
        found = count_tokens(" ".join(words))
        if found == num_tokens:
            break
        if found < num_tokens:
            words += [draw.choice(_WORDS) for _ in range(num_tokens - found)]
        else:
            words = words[: max(1, len(words) * num_tokens // found)]
    return " ".join(words)
