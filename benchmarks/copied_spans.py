"""What of an answer is copied from its prompt, and whether it loops."""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 8  # tokens that must be the prompt's to count as copied
LOOPING = (16, 3)  # tokens of a loop at least, and how often its span comes


def copied_share(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Share of an answer's tokens that stand in the prompt in runs of `SPAN` or more."""
    runs = {tuple(prompt[i : i + SPAN]) for i in range(len(prompt) - SPAN + 1)}
    copied = [False] * len(answer)
    for i in range(len(answer) - SPAN + 1):
        if tuple(answer[i : i + SPAN]) in runs:
            copied[i : i + SPAN] = [True] * SPAN
    return sum(copied) / max(1, len(answer))


def loops(tokens: Sequence[int]) -> bool:
    """Whether a span comes three times in a row."""
    least, times = LOOPING
    for period in range(1, len(tokens) // times + 1):
        needed, run = max(least, times * period) - period, 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= needed:
                return True
    return False
