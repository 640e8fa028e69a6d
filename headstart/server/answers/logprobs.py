"""Log-probabilities in the two shapes of OpenAI's API, and those of prompts in vLLM's.

With `as_ids` tokens are written `token_id:N`, which no two tokens share.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from headstart.errors import RequestError
from headstart.sampling.choose import TokenLogprob
from headstart.server.pieces import Pieces

_LEAST = -9999.0  # JSON has no minus infinity; OpenAI writes this number for it
MOST_PROMPT_ENTRIES = 1_000_000  # log-probabilities of prompts in one answer


def check_prompt_entries(num_tokens: int, num_top: int | None, copies: int, field: str) -> None:
    """RequestError where the log-probabilities of prompts would be too many."""
    if num_top is None:
        return
    number = num_tokens * (1 + num_top) * copies
    if number > MOST_PROMPT_ENTRIES:
        raise RequestError(
            f"{field} asks for {number} log-probabilities of prompts ({num_tokens} tokens, each "
            f"with {num_top} alternatives, {copies} times); one answer holds at most "
            f"{MOST_PROMPT_ENTRIES}. Ask for fewer alternatives, answers or tokens.",
            field=field,
        )


def chat_logprobs(
    entries: Sequence[TokenLogprob], pieces: Pieces, *, as_ids: bool = False
) -> dict[str, Any]:
    content = []
    for entry in entries:
        shown = _entry(entry.token, entry.logprob, pieces, as_ids)
        shown["top_logprobs"] = [
            _entry(token, value, pieces, as_ids) for token, value in entry.top.items()
        ]
        content.append(shown)
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, pieces: Pieces, as_ids: bool) -> dict[str, Any]:
    piece = pieces.of(token)
    value = logprob if logprob > _LEAST else _LEAST
    text = _by_id(token) if as_ids else piece.text
    return {"token": text, "logprob": value, "bytes": piece.numbers}


def _by_id(token: int) -> str:
    return f"token_id:{token}"


def prompt_logprobs(
    entries: Sequence[TokenLogprob], pieces: Pieces
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: by token id, nothing for the first token, ranks of the best ones."""
    shown: list[dict[str, dict[str, Any]] | None] = [None]
    for token, logprob, top in entries:
        ranks = {other: rank for rank, other in enumerate(top, 1)}
        shown.append(
            {
                str(other): {
                    "logprob": max(value, _LEAST), "rank": ranks.get(other),
                    "decoded_token": pieces.of(other).text,
                }
                for other, value in {token: logprob, **top}.items()
            }
        )  # fmt: skip
    return shown


def completion_logprobs(
    entries: Sequence[TokenLogprob], pieces: Pieces, offsets: TextOffsets, *,
    first: int | None = None, as_ids: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The older shape; `offsets` has been given the sample's tokens before these ones.

    `first`: a token before them that has no log-probability, as the first one of a prompt.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    begins: list[int] = []

    def spelled(token: int) -> str:
        return _by_id(token) if as_ids else pieces.of(token).spelled

    if first is not None:
        tokens.append(spelled(first))
        values.append(None)
        tops.append(None)
        begins.append(offsets.add(first))
    piece_of, begin = pieces.of, offsets.add
    for token, logprob, top in entries:
        text = _by_id(token) if as_ids else piece_of(token).spelled
        value = logprob if logprob > _LEAST else _LEAST
        tokens.append(text)
        values.append(value)
        tops.append(_alternatives(token, logprob, top, spelled) if top else {text: value})
        begins.append(begin(token))
    return {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": begins,
    }  # fmt: skip


class TextOffsets:
    """Where in its text each token of a sample begins.

    A token begins with the character that its first byte belongs to, which may have begun earlier.
    """

    def __init__(self, pieces: Pieces, *, skip_special: bool):
        self._pieces, self._skip_special = pieces, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._size = 0  # characters so far
        self._is_first = True
        self._is_between = True  # no character has begun that has not ended

    def copy(self) -> TextOffsets:
        """One that goes on from here by itself."""
        own = TextOffsets(self._pieces, skip_special=self._skip_special)
        own._decoder.setstate(self._decoder.getstate())
        own._size, own._is_first = self._size, self._is_first
        own._is_between = self._is_between
        return own

    def add(self, token: int) -> int:
        piece = self._pieces.of(token)
        if self._is_between and piece.is_whole and not self._is_first:
            if piece.is_special and self._skip_special:
                return self._size
            begin, self._size = self._size, self._size + len(piece.text)
            return begin
        begin = self._add_bytes(token)
        self._is_between = not self._decoder.getstate()[0]
        return begin

    def _add_bytes(self, token: int) -> int:
        data = b""
        if not (self._skip_special and self._pieces.is_special(token)):
            data = (
                self._pieces.bytes_at_start(token)
                if self._is_first
                else self._pieces.bytes_of(token)
            )
            self._is_first = False
        self._size += len(self._decoder.decode(data[:1]))
        is_inside = bool(self._decoder.getstate()[0]) or not data
        begin = self._size if is_inside else self._size - 1
        self._size += len(self._decoder.decode(data[1:]))
        return begin


def _alternatives(
    token: int, logprob: float, top: dict[int, float], spelled: Callable[[int], str]
) -> dict[str, float]:
    """Log-probabilities by text, the chosen token's too; a text that comes again, by its id."""
    shown: dict[str, float] = {}
    for other, value in {**top, token: logprob}.items():
        text = spelled(other)
        shown[text if text not in shown else _by_id(other)] = max(value, _LEAST)
    return shown
