"""The texts of a store as they are learned from: read now and then, thinned out, held out.

What nothing can be learned from is left out, such as answers that begin behind the longest length.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headstart.learn.store import KeptText, Store

if TYPE_CHECKING:
    from headstart.data.records import Record

_SECONDS = 1.0  # between two looks at what was written
# To put a million texts in order takes a second: a hundredth of the time at most goes there.
_TIMES, _MOST_SECONDS = 100, 300.0
_MOST_KINDS = 4096  # that are told
_RETRY_SECONDS = 60.0  # after a disk did not take what was thinned out


class Reading:
    """Records of a store, oldest first, on both sides."""

    def __init__(
        self, store: Store, can_learn: Callable[[Record], bool],
        tell: Callable[[str, dict[str, Any]], None],
    ):  # fmt: skip
        self.store, self._can_learn, self._tell = store, can_learn, tell
        self.train: list[Record] = []
        self.heldout: list[Record] = []  # the newest answer to each prompt
        self._useless = 0  # texts so far
        self._has_told_kinds = False
        self.next_look = self._next_thinning = 0.0  # of time.monotonic

    def refresh(self) -> list[KeptText] | None:
        """What is new to learn from; None where nothing has changed, or it is too early to look."""
        now = time.monotonic()
        if now < self.next_look:
            return None
        self.next_look = now + _SECONDS
        is_more = bool(self.store.refresh())
        if not (self._thin(now) or is_more):
            return None
        started = time.process_time()
        useful = self._useful([t for t in self.store.texts.values() if t.is_useful is None])
        self.train = [text.record for text in self.store.split(is_heldout=False)]
        self.heldout = newest_answers(text.record for text in self.store.split(is_heldout=True))
        if not self._has_told_kinds:  # those of texts that an earlier server kept
            self._has_told_kinds = True
            self._tell("kinds", {"kinds": most_common(self.train)})
        self._tell("texts", {
            "train": len(self.train), "heldout": len(self.heldout),
            "bytes": self.store.num_bytes, "useless": self._useless,
        })  # fmt: skip
        took = _TIMES * (time.process_time() - started)
        self.next_look = now + min(_MOST_SECONDS, max(_SECONDS, took))
        return useful

    def _useful(self, new: list[KeptText]) -> list[KeptText]:
        for text in new:
            text.is_useful = self._can_learn(text.record)
        useful = [text for text in new if text.is_useful]
        self._useless += len(new) - len(useful)
        return useful

    def _thin(self, now: float) -> bool:
        """Whether there are other texts now."""
        if now < self._next_thinning:
            return False
        try:
            dropped = self.store.thin()
        except OSError as error:  # a full disk; some may be gone all the same
            self._next_thinning = now + _RETRY_SECONDS
            self._tell("crowded", {"reason": f"texts could not be thinned out ({error.strerror})"})
            return True
        if dropped:
            self._tell("thinned", {"dropped": dropped})
        return dropped > 0


def newest_answers(records: Iterable[Record]) -> list[Record]:
    """The newest answer to each prompt, oldest first: a prompt that comes every minute would make
    one answer look like many."""
    found: dict[str, Record] = {}
    for record in records:
        found.pop(record.prompt_id, None)  # its place is that of its newest answer
        found[record.prompt_id] = record
    return list(found.values())


def most_common(records: Iterable[Record]) -> list[str]:
    """Kinds of these."""
    return [kind for kind, _ in Counter(own.category for own in records).most_common(_MOST_KINDS)]
