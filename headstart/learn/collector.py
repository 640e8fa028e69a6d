"""Takes served answers off the engine's thread, and writes them to disk in one of its own.

Between two writes at most so many answers of a kind are held, drawn evenly from all that came. The
trunk's states go with them where there are any and there is room. A disk that is full costs states
and texts, never an answer.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.files import write_whole
from headstart.learn.appending import size_of
from headstart.learn.folder import Folder
from headstart.learn.state_files import SERVED, StateWriter
from headstart.learn.store import TextWriter
from headstart.learn.texts import Text

if TYPE_CHECKING:
    from headstart.engine.kept_states import KeptStates

_log = logging.getLogger("headstart.learn")
_WRITE_SECONDS = 5.0
_MOST_OF_KIND = 256  # answers of one kind between two writes
_MOST_KINDS = 64
_MOST_TOKENS = 1 << 22  # that are held at once: a disk that hangs must not fill the memory
_MOST_STATE_BYTES = 1 << 28  # of states that are held between two writes
_SAY_SECONDS = 600.0


@dataclass
class Collected:
    """Counters; read from any thread."""

    texts: int = 0
    tokens: int = 0
    num_bytes: int = 0
    passed_over: int = 0  # more came than is held between two writes
    lost: int = 0  # could not be written
    with_states: int = 0  # texts


@dataclass(frozen=True)
class _Held:
    text: Text
    states: KeptStates | None

    @property
    def num_tokens(self) -> int:
        return len(self.text.prompt) + len(self.text.answer)


class Collector:
    """`offer` may be called in any thread and returns at once."""

    def __init__(self, folder: Folder, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        self._writer = TextWriter(folder.texts, max_bytes)
        self._state_writer = StateWriter(folder, SERVED, max_bytes)
        self._lock = threading.Lock()
        self._held: dict[str, list[_Held]] = {}
        self._num_tokens = 0  # of what is held
        self._state_bytes = 0  # that came since the last write
        self._seen: dict[str, int] = {}
        self._rng = random.Random()
        self._end = threading.Event()
        self._said = -_SAY_SECONDS
        self.counts = Collected()
        self._thread = threading.Thread(target=self._run, name="learn-texts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, text: Text, states: KeptStates | None = None) -> None:
        kind = text.kind
        with self._lock:
            if states is not None:
                self._state_bytes += states.num_bytes
            has_room = self._state_bytes <= _MOST_STATE_BYTES
            new = _Held(text, states if has_room else None)
            if kind not in self._held and len(self._held) >= _MOST_KINDS:
                kind = next(iter(self._held))
            held = self._held.setdefault(kind, [])
            seen = self._seen[kind] = self._seen.get(kind, 0) + 1
            if len(held) < _MOST_OF_KIND:
                held.append(new)
                self._num_tokens += new.num_tokens
                self._drop_some()
                return
            self.counts.passed_over += 1
            place = self._rng.randrange(seen)  # each of those seen stays with the same chance
            if place < _MOST_OF_KIND:
                self._num_tokens += new.num_tokens - held[place].num_tokens
                held[place] = new

    def _drop_some(self) -> None:
        """While there are too many tokens, an answer of the kind that holds most."""
        while self._num_tokens > _MOST_TOKENS:
            held = max(self._held.values(), key=len)
            self._num_tokens -= held.pop(self._rng.randrange(len(held))).num_tokens
            self.counts.passed_over += 1

    def close(self) -> None:
        """Write what is held."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_WRITE_SECONDS)

    def flush(self) -> None:
        """Write what is held; by the collector's thread."""
        with self._lock:
            held, self._held, self._seen = self._held, {}, {}
            self._state_bytes = self._num_tokens = 0
        taken = [each for part in held.values() for each in part]
        texts = [each.text for each in taken]
        if not texts:
            return
        try:
            self._writer.begin()
            if self._used_bytes() > self._max_bytes:
                self._say("there is no room for more texts, and the learner has not thinned them")
                self.counts.lost += len(texts)
                return
            self.counts.num_bytes += self._writer.add(texts)
        except OSError as error:
            self.counts.lost += len(texts)
            self._say(f"texts are not collected: {error.strerror} ({self._folder.texts})")
            return
        self.counts.texts += len(texts)
        self.counts.tokens += sum(len(text.prompt) + len(text.answer) for text in texts)
        self._write_states(taken)

    def _write_states(self, written: Iterable[_Held]) -> None:
        """Texts come first: states take what these leave of the room, and of the disk."""
        try:
            self._state_writer.make_room()
            for held in written:
                states = None if held.states is None else held.states.of(held.num_tokens)
                if held.states is not None and states is not None:
                    added = self._state_writer.add(held.text.id, held.states.kind, states)
                    self.counts.with_states += added > 0
        except OSError as error:
            self._say(f"states of texts are not kept: {error.strerror} ({self._folder.states})")

    def _used_bytes(self) -> int:
        return sum(size_of(path) for path in self._folder.texts.glob("*.jsonl"))

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_SECONDS:
            self._said = now
            _log.warning("learning: %s; serving goes on", what)

    def _run(self) -> None:
        while not self._end.wait(_WRITE_SECONDS):
            self._guarded_flush()
        self._guarded_flush()
        self._writer.close()
        self._state_writer.close()

    def _guarded_flush(self) -> None:
        try:
            self.flush()
        except Exception:
            _log.exception("learning: texts could not be written; serving goes on")


def write_status(folder: Folder, text: str) -> None:
    """For `headstart learn status`; a full disk is not an error."""
    try:
        write_whole(folder.status, text.encode(), is_only_writer=True)
    except OSError:
        return
