"""Records made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.bench.records import RequestRecord, RunRecord


def request(
    chunks: Sequence[tuple[float, int]] = (), *, sent: float = 0.0, **fields: Any
) -> RequestRecord:
    """Chunks are (seconds, tokens)."""
    seconds = tuple(moment for moment, _ in chunks)
    given = {"id": "q", "due_seconds": sent, "end_seconds": max([sent, *seconds])} | fields
    given = {"conversation": given["id"]} | given
    return RequestRecord(
        sent_seconds=sent, chunk_seconds=seconds, chunk_tokens=tuple(n for _, n in chunks), **given
    )


def run(*requests: RequestRecord, **fields: Any) -> RunRecord:
    end = max((r.end_seconds for r in requests), default=0.0)
    given = {"variant": "v", "started_at": "2026-01-01T00:00:00+00:00", "duration_seconds": end}
    return RunRecord(requests=requests, **(given | fields))
