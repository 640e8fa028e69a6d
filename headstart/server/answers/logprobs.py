"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.engine.outputs import TokenLogprob
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
    entries: Sequence[TokenLogprob], pieces: Pieces, offset: int
) -> tuple[dict[str, Any], int]:
    """The older shape, and the offset where the next chunk goes on."""
    tokens = [pieces.text_of(entry.token) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    shown = {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {pieces.text_of(token): _finite(value) for token, value in entry.top.items()}
            for entry in entries
        ],
        "text_offset": offsets,
    }
    return shown, offset


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes this number for it."""
    return max(logprob, -9999.0)
