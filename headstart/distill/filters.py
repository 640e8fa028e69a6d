"""Which answers are worth learning from, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.data.fingerprints import is_heldout
from headstart.data.journal import Answer
from headstart.distill.minhash import Text, near_duplicates
from headstart.distill.options import DistillOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_GRAM = 8  # tokens that must come again together to count as repeated
_MIN_GRAMS = 32  # a shorter text repeats itself by chance
_TAIL_REPEATS, _TAIL_TOKENS = 4, 32  # an end that comes so often and is so long is a loop
_LONGEST_PERIOD = 256


@dataclass(frozen=True)
class Verdict:
    """What becomes of an answer: dropped for a reason, or kept in a split."""

    answer: Answer
    reason: str | None
    is_heldout: bool


def judge(answers: Sequence[Answer], options: DistillOptions) -> list[Verdict]:
    """A verdict on each answer, in an order that does not depend on when answers came."""
    ordered = sorted(answers, key=lambda a: (a.prompt_id, a.sample, a.turn))
    reasons: dict[int, str] = {}
    dropped: set[tuple[str, int]] = set()
    for place, answer in enumerate(ordered):
        dialogue = (answer.prompt_id, answer.sample)
        reason = fault(answer, options)
        if reason is None and dialogue in dropped:
            reason = "after a dropped turn"
        if reason is not None:
            reasons[place] = reason
            dropped.add(dialogue)
    heldout = [is_heldout(answer.prompt_sha, options.heldout) for answer in ordered]
    # Held-out answers come first: of a pair across the splits, the training side goes.
    good = sorted(
        (i for i in range(len(ordered)) if i not in reasons), key=lambda i: not heldout[i]
    )
    texts = [
        Text(ordered[i].user, ordered[i].text, f"{ordered[i].prompt_sha} {ordered[i].turn}")
        for i in good
    ]
    for place, twin in near_duplicates(texts, options.max_similarity).items():
        is_across = heldout[good[place]] != heldout[good[twin]]
        reasons[good[place]] = (
            "near-duplicate of a held-out answer" if is_across else "near-duplicate"
        )
    return [
        Verdict(answer, reasons.get(place), heldout[place]) for place, answer in enumerate(ordered)
    ]


def fault(answer: Answer, options: DistillOptions) -> str | None:
    """What is wrong with an answer by itself."""
    import numpy as np

    ids = np.asarray(answer.answer_ids, np.int64)
    if not len(ids) or not answer.text.strip():
        return "empty"
    if len(ids) < options.min_answer_tokens:
        return "short"
    if is_looping(ids, options.max_repetition):
        return "looping"
    if answer.finish_reason != "stop" and not options.keep_truncated:
        return "truncated"
    return None


def is_looping(ids: NDArray[np.int64], max_repetition: float) -> bool:
    """Whether the end repeats itself, or too much of the whole does; never, if all of it may."""
    if max_repetition >= 1:
        return False
    return _has_looping_end(ids) or repetition(ids) > max_repetition


def repetition(ids: NDArray[np.int64]) -> float:
    """The share of runs of tokens that occurred before; 0 for short texts."""
    import numpy as np

    if len(ids) < _GRAM + _MIN_GRAMS:
        return 0.0
    runs = np.lib.stride_tricks.sliding_window_view(ids, _GRAM)
    return 1 - len(np.unique(runs, axis=0)) / len(runs)


def _has_looping_end(ids: NDArray[np.int64]) -> bool:
    """Whether one stretch of tokens fills the end; the last few tokens may differ (an end token,
    the beginning of another round)."""
    body = ids[:-1]
    for period in range(1, min(_LONGEST_PERIOD, len(body) // _TAIL_REPEATS) + 1):
        same = body[period:] == body[:-period]
        breaks = (~same).nonzero()[0]
        run = len(same) if not len(breaks) else len(same) - 1 - int(breaks[-1])
        if run + period >= max(_TAIL_REPEATS * period, _TAIL_TOKENS):
            return True
    return False
