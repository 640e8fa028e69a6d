"""When tokens arrived, and the gaps between them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence


class Arrivals:
    """Chunks of tokens by request, each with the time at which its step came back."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.chunks: dict[str, list[tuple[float, list[int]]]] = defaultdict(list)

    def note(self, chunks: Sequence[tuple[str, list[int]]]) -> None:
        """What one step gave."""
        if not chunks:
            return
        self.last = time.perf_counter()
        for name, tokens in chunks:
            self.chunks[name].append((self.last, tokens))

    def count(self, name: str) -> int:
        return sum(len(tokens) for _, tokens in self.chunks[name])

    def tokens(self, name: str) -> list[int]:
        return [token for _, tokens in self.chunks[name] for token in tokens]

    def gaps(self, names: Sequence[str], start: float, stop: float) -> dict[str, float] | None:
        """Gaps that overlap [start, stop], of all `names` together; None where there are none.

        A chunk's tokens arrive together: per token, its gap is shared out among them.
        """
        found = [
            (time_ - before, len(tokens))
            for name in names
            for (before, _), (time_, tokens) in zip(
                self.chunks[name], self.chunks[name][1:], strict=False
            )
            if before < stop and time_ > start
        ]
        if not found:
            return None
        chunks = [gap for gap, _ in found]
        per_token = [gap / count for gap, count in found for _ in range(count)]
        return {
            "chunks": len(chunks),
            "tokens": len(per_token),
            "chunk_p50_seconds": statistics.median(chunks),
            "chunk_max_seconds": max(chunks),
            "token_p50_seconds": statistics.median(per_token),
            "token_mean_seconds": statistics.mean(per_token),
        }
