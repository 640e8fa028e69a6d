"""Markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


def num_held(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
