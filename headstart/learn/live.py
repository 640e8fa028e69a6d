"""Whether a head that was swapped in holds what it promised, on what is served.

Answers before and after a swap are different ones, and of different kinds. So rates are compared
within kinds, and what counts is how often the first draft is accepted: unlike acceptance length
it does not depend on how many drafts `auto` chooses.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from headstart.learn.certainty import FEWEST, Gain, Walked, compare_live
from headstart.learn.kinds import OTHER

_KEPT = 400  # answers of each head
ENOUGH = 30  # answers of a new head, until it is judged
_SHARE = 0.5  # of what was promised, that must come with 95 % certainty not excluded


class LiveWatch:
    """Answers of the serving head and of the one before it; safe in any thread.

    `observe` is for the engine's thread: it never waits for a comparison.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: deque[Walked] = deque(maxlen=_KEPT)
        self._after: deque[Walked] = deque(maxlen=_KEPT)
        self._num_after = 0  # answers since the last swap
        self._promise: float | None = None  # None: nothing to judge

    def observe(self, walked: Walked) -> None:
        if walked.tried:
            with self._lock:
                self._after.append(walked)
                self._num_after += 1

    def swapped(self, promise: float) -> None:
        """Another head serves, and promises a gain of first drafts."""
        with self._lock:
            self._before, self._after = self._after, deque(maxlen=_KEPT)
            self._promise, self._num_after = promise, 0

    def taken_back(self) -> None:
        """The head before serves again."""
        with self._lock:
            self._after, self._before = self._before, deque(maxlen=_KEPT)
            self._promise = None

    @property
    def gain(self) -> Gain:
        """Live gain of the serving head over the one before, on kinds that both answered; small
        kinds count as one, so that many of them tell as much as few."""
        with self._lock:
            kept = [list(part) for part in (self._before, self._after)]
        before, after = (_with_small_as_one(_by_kind(part)) for part in kept)
        shared = [
            kind for kind in after
            if len(after[kind]) >= FEWEST and len(before.get(kind, ())) >= FEWEST
        ]  # fmt: skip
        # Kinds of the answers before get the shares that they have now.
        weighed: list[Walked] = []
        for kind in shared:
            own = before[kind]
            factor = sum(each.tried for each in after[kind]) / sum(each.tried for each in own)
            weighed += [_scaled(each, factor) for each in own]
        return compare_live(weighed, [each for kind in shared for each in after[kind]])

    def judge(self) -> tuple[Gain, str | None]:
        """The live gain, and why the head should be taken back.

        None where it holds, or it is too early to say.
        """
        gain, promise = self.gain, self._promise
        if promise is None or gain.answers < ENOUGH:
            return gain, None
        if gain.high >= _SHARE * promise:
            if self._num_after >= _KEPT:
                self._promise = None  # it has held for long enough
            return gain, None
        return gain, (
            f"first drafts are accepted {gain.new:.3f} of the time, {gain.old:.3f} before "
            f"({gain.value:+.1%}, at most {gain.high:+.1%} with 95 % certainty); "
            f"{promise:+.1%} was promised"
        )


def _by_kind(answers: Sequence[Walked]) -> dict[str, list[Walked]]:
    result: dict[str, list[Walked]] = {}
    for each in answers:
        result.setdefault(each.kind, []).append(each)
    return result


def _with_small_as_one(kinds: dict[str, list[Walked]]) -> dict[str, list[Walked]]:
    large = {kind: own for kind, own in kinds.items() if len(own) >= FEWEST and kind != OTHER}
    return large | {
        OTHER: [each for kind, own in kinds.items() if kind not in large for each in own]
    }


def _scaled(walked: Walked, factor: float) -> Walked:
    return replace(walked, tried=walked.tried * factor, firsts=walked.firsts * factor)
