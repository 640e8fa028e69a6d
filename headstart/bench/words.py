"""Numbers as people type and read them: one way for all options and tables."""

from __future__ import annotations

import math


def positive_number(text: str) -> float | None:
    """None for what is no number above 0, or no end of one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def stream_words(number: int) -> str:
    """`1 stream`, `4 streams`."""
    return f"{number} stream{'' if number == 1 else 's'}"
