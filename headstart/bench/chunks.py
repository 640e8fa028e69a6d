"""One streamed answer, put together from its events: text, tokens of each chunk, counters.

A server says in one of several ways how many tokens a chunk holds, or not at all; what it said is
kept, and judged when the stream is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from headstart.bench.records import Failure, FailureKind, Speculation, TokenCount
from headstart.bench.response_counters import speculation_of_response
from headstart.bench.sse import DONE
from headstart.documents import parse_json

_SHOWN = 200  # characters of a server's words that are kept


class BrokenStream(Exception):
    """The stream says something that an answer does not have."""

    def __init__(self, kind: FailureKind, words: str):
        super().__init__(words)
        self.failure = Failure(kind, words[:_SHOWN])


@dataclass(slots=True)
class _Chunk:
    seconds: float
    text: str
    num_ids: int | None
    num_origins: int | None
    total: int | None  # of the answer so far, as usage says

    @property
    def is_bare(self) -> bool:
        """An end token writes nothing: only the total tells of it."""
        return not (self.text or self.num_ids or self.num_origins)


class AnswerReader:
    """Takes events in order."""

    def __init__(self) -> None:
        self.content = ""  # what a user sees: the history of a conversation
        self.finish_reason: str | None = None
        self.is_done = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.speculation: Speculation | None = None
        self._chunks: list[_Chunk] = []
        self._ids: list[int] = []
        self._total: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.is_done or self.finish_reason is not None

    @property
    def num_chunks(self) -> int:
        """Those with text or tokens in them."""
        return sum(not chunk.is_bare for chunk in self._chunks)

    def take(self, seconds: float, data: bytes) -> None:
        """One event; BrokenStream for an error, and for what is no chunk."""
        if data == DONE:
            self.is_done = True
            return
        document = _document(data)
        self._take_usage(document.get("usage"))
        self.speculation = speculation_of_response(document) or self.speculation
        choices = document.get("choices")
        if not isinstance(choices, list):
            raise BrokenStream("malformed", f"a chunk without choices: {_shown(data)}")
        for choice in choices:
            if not isinstance(choice, dict):
                raise BrokenStream("malformed", f"a choice that is no object: {_shown(data)}")
            if choice.get("index", 0) == 0:
                self._take_choice(seconds, choice)

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self._total = _whole_number(usage.get("completion_tokens"), self._total)
        self.prompt_tokens = _whole_number(usage.get("prompt_tokens"), self.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _whole_number(details.get("cached_tokens"), self.cached_tokens)

    def _take_choice(self, seconds: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        source = delta if isinstance(delta, dict) else choice
        content = source.get("content" if delta is not None else "text") or ""
        reasoning = source.get("reasoning_content") or source.get("reasoning") or ""
        if not isinstance(content, str) or not isinstance(reasoning, str):
            raise BrokenStream("malformed", f"text that is no text: {_shown(choice)}")
        ids, extra = choice.get("token_ids"), choice.get("headstart")
        origins = extra.get("origins") if isinstance(extra, dict) else None
        num_ids = len(ids) if isinstance(ids, list) else None
        num_origins = len(origins) if isinstance(origins, list) else None
        chunk = _Chunk(seconds, reasoning + content, num_ids, num_origins, self._total)
        told = self._chunks[-1].total if self._chunks else 0
        if not chunk.is_bare or (self._total or 0) > (told or 0):
            self.content += content
            self._ids += ids if isinstance(ids, list) else ()
            self._chunks.append(chunk)
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])

    @property
    def text(self) -> str:
        """Everything the model wrote, reasoning included."""
        return "".join(chunk.text for chunk in self._chunks)

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        return tuple(self._ids) if self._ids else None

    def timeline(
        self, count_tokens: Callable[[str], int] | None
    ) -> tuple[TokenCount, list[float], list[int]]:
        """How tokens were counted, when chunks came, and how many tokens each had.

        Parts of one step that hold no token of their own (a server may send its text in pieces)
        are no chunks, where the server says so.
        """
        by_usage = self._by_usage()
        if by_usage is None or self._ids:
            chunks = [chunk for chunk in self._chunks if not chunk.is_bare]
            counted_by, tokens = self._count(chunks, count_tokens)
        else:
            chunks, counted_by, tokens = self._chunks, "usage", by_usage
        kept = [(c.seconds, n) for c, n in zip(chunks, tokens, strict=True) if n]
        return counted_by, [seconds for seconds, _ in kept], [number for _, number in kept]

    def _by_usage(self) -> list[int] | None:
        """Tokens of every chunk where each came with the total so far, bare ones included."""
        known = [chunk.total for chunk in self._chunks if chunk.total is not None]
        if not self.num_chunks or len(known) < len(self._chunks) or known != sorted(known):
            return None
        if self._total is not None and self._total > known[-1]:
            known[-1] = self._total  # the last event, which is no chunk, tells of an end token
        return [total - last for last, total in pairwise([0, *known])] if known[-1] else None

    def _count(
        self, chunks: Sequence[_Chunk], count_tokens: Callable[[str], int] | None
    ) -> tuple[TokenCount, list[int]]:
        if not chunks:
            return "none", []
        if self._ids:
            return "token_ids", [chunk.num_ids or 0 for chunk in chunks]
        if any(chunk.num_origins for chunk in chunks):
            return "origins", [chunk.num_origins or 0 for chunk in chunks]
        if count_tokens is not None:
            weights = [max(1, count_tokens(chunk.text)) for chunk in chunks]
            return "tokenizer", spread_over(self._total or sum(weights), weights)
        if self._total:
            return "spread", spread_over(self._total, [max(1, len(c.text)) for c in chunks])
        return "chunks", [1] * len(chunks)


def spread_over(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `total`, near its shares by weight; at least 1 each where there
    is enough for that.

    spread_over(7, [1, 1, 2]) == [2, 2, 3]
    """
    whole, reached = sum(weights), accumulate(weights)
    ends = [(2 * total * upto + whole) // (2 * whole) for upto in reached]  # rounded
    parts = [end - start for start, end in pairwise([0, *ends])]
    while 0 in parts and total >= len(parts):
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return parts


def error_words(document: Any) -> str | None:
    """What an error object says; None for anything else."""
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if error is None and document.get("object") == "error":
        error = document
    if isinstance(error, dict):
        return str(error.get("message") or error)[:_SHOWN]
    return str(error)[:_SHOWN] if error else None


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = parse_json(data)
    except ValueError:
        raise BrokenStream("malformed", f"a chunk that is not JSON: {_shown(data)}") from None
    words = error_words(document)
    if words is not None:
        raise BrokenStream("stream_error", words)
    if not isinstance(document, dict):
        raise BrokenStream("malformed", f"a chunk that is no object: {_shown(data)}")
    return document


def _whole_number(value: Any, otherwise: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else otherwise


def _shown(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return repr(text[:80])
