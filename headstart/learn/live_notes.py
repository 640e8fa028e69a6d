"""Writes beside each learned head what was measured while it served: how its first drafts did.

Written now and then, and whenever another head takes its place: a kill loses a minute of it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict

from headstart.learn.certainty import Gain
from headstart.learn.heads import LearnedHeads
from headstart.learn.live import LiveWatch

_WRITE_SECONDS = 60.0


class LiveNotes:
    """Belongs to the thread that swaps heads."""

    def __init__(self, heads: LearnedHeads, live: LiveWatch):
        self._heads, self._live = heads, live
        self._name: str | None = None  # None: the gain is of no head that the record names
        self._noted: Gain | None = None
        self._written = 0.0

    def begin(self, name: str) -> None:
        """This head serves from now on, and answers are compared with those of the one before."""
        self._name, self._noted, self._written = name, None, time.monotonic()

    def end(self) -> None:
        """The head before serves again: it has no gain over the one that was taken back."""
        self._name = None

    def now_and_then(self, gain: Gain) -> None:
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self.write(gain)

    def write(self, gain: Gain | None = None) -> None:
        """Of the head that serves; without a gain given, the one so far."""
        gain = self._live.gain if gain is None else gain
        if self._name is None or not gain.answers or gain == self._noted:
            return
        self._noted, self._written = gain, time.monotonic()
        with contextlib.suppress(OSError):  # a full disk: the record in memory has it
            self._heads.note_live(self._name, asdict(gain))
