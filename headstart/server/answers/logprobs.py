"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from headstart.sampling.choose import TokenLogprob
from headstart.server.pieces import Piece, Pieces

_LEAST = -9999.0  # JSON has no minus infinity; OpenAI writes this number for it


def chat_logprobs(entries: Sequence[TokenLogprob], pieces: Pieces) -> dict[str, Any]:
    content = []
    for entry in entries:
        shown = _entry(pieces.of(entry.token), entry.logprob)
        shown["top_logprobs"] = [_entry(pieces.of(i), value) for i, value in entry.top.items()]
        content.append(shown)
    return {"content": content, "refusal": None}


def _entry(piece: Piece, logprob: float) -> dict[str, Any]:
    value = logprob if logprob > _LEAST else _LEAST
    return {"token": piece.text, "logprob": value, "bytes": piece.numbers}


def completion_logprobs(
    entries: Sequence[TokenLogprob], pieces: Pieces, offsets: TextOffsets
) -> dict[str, Any]:
    """The older shape; `offsets` has been given the sample's tokens before these ones."""
    tokens, values, tops, begins = [], [], [], []
    for token, logprob, top in entries:
        text, value = pieces.of(token).spelled, max(logprob, _LEAST)
        tokens.append(text)
        values.append(value)
        tops.append(_alternatives(token, logprob, top, pieces) if top else {text: value})
        begins.append(offsets.add(token))
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

    def add(self, token: int) -> int:
        piece = self._pieces.of(token)
        if self._is_between and piece.is_whole and not self._is_first:
            if self._skip_special and self._pieces.is_special(token):
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
    token: int, logprob: float, top: dict[int, float], pieces: Pieces
) -> dict[str, float]:
    """Log-probabilities by text, the chosen token's too; a text that comes again, by its id."""
    shown: dict[str, float] = {}
    for other, value in {**top, token: logprob}.items():
        text = pieces.of(other).spelled
        shown[text if text not in shown else f"token_id:{other}"] = max(value, _LEAST)
    return shown
