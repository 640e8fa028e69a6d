"""What a text would go on with if it went on copying: from its earlier part, or another answer."""

from __future__ import annotations

from typing import NamedTuple

from headstart.copying.answers import AnswerStore
from headstart.copying.index import TextIndex, continued

MAX_COPIED = 16  # tokens of one round


class Copy(NamedTuple):
    """Tokens that may follow, and how many tokens before them agree with where they come from."""

    tokens: list[int]
    length: int

    def num_right(self, following: list[int]) -> int:
        """How many of these tokens a text went on with, as far as `following` tells."""
        count = 0
        for own, token in zip(self.tokens, following, strict=False):
            if own != token:
                break
            count += 1
        return count


def copy_after(
    text: TextIndex, *, answers: AnswerStore | None = None, owner: bytes = b"",
    count: int = MAX_COPIED,
) -> Copy | None:  # fmt: skip
    """The next `count` tokens, by the longest match; of the text itself where both are as long."""
    own = text.match()
    found = answers.find(owner, text.tokens) if answers is not None else None
    if found is not None and (own is None or found.length > own.length):
        return Copy(continued(found.tokens, found.place, count), found.length)
    if own is None:
        return None
    return Copy(text.following(own.place, count), own.length)
