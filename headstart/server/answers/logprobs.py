"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from headstart.sampling.choose import TokenLogprob
from headstart.server.pieces import Pieces


def chat_logprobs(entries: Sequence[TokenLogprob], pieces: Pieces) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(entry.token, entry.logprob, pieces),
                "top_logprobs": [
                    _entry(token, value, pieces) for token, value in entry.top.items()
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _entry(token: int, logprob: float, pieces: Pieces) -> dict[str, Any]:
    return {
        "token": pieces.text_of(token),
        "logprob": _finite(logprob),
        "bytes": list(pieces.bytes_of(token)),
    }


def completion_logprobs(
    entries: Sequence[TokenLogprob], pieces: Pieces, offsets: TextOffsets
) -> dict[str, Any]:
    """The older shape; `offsets` has been given the sample's tokens before these ones."""
    return {
        "tokens": [_spelled(entry.token, pieces) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_alternatives(entry, pieces) for entry in entries],
        "text_offset": [offsets.add(entry.token) for entry in entries],
    }


class TextOffsets:
    """Where in its text each token of a sample begins.

    A token begins with the character that its first byte belongs to, which may have begun earlier.
    """

    def __init__(self, pieces: Pieces, *, skip_special: bool):
        self._pieces, self._skip_special = pieces, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._size = 0  # characters so far
        self._is_first = True

    def add(self, token: int) -> int:
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


def _alternatives(entry: TokenLogprob, pieces: Pieces) -> dict[str, float]:
    """Log-probabilities by text, the chosen token's too; a text that comes again, by its id."""
    shown: dict[str, float] = {}
    for token, value in {**entry.top, entry.token: entry.logprob}.items():
        text = _spelled(token, pieces)
        shown[text if text not in shown else f"token_id:{token}"] = _finite(value)
    return shown


def _spelled(token: int, pieces: Pieces) -> str:
    """A token's text, or its bytes as numbers where they are no text, as OpenAI writes them."""
    data = pieces.bytes_of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes this number for it."""
    return max(logprob, -9999.0)
