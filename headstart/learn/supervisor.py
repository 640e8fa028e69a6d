"""Learning as a server has it: what was collected, the learner's process, swaps and rollbacks.

One thread swaps heads, takes them back and restarts the learner, so that these never meet. Whatever
goes wrong here is said in the log, and serving goes on with the head that it has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import first_line
from headstart.learn.certainty import Walked
from headstart.learn.child import Child, Pace
from headstart.learn.collector import Collector, write_status
from headstart.learn.folder import START, Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.heard import first_numbers, note
from headstart.learn.kinds import Kinds
from headstart.learn.live import LiveWatch
from headstart.learn.live_notes import LiveNotes
from headstart.learn.options import LearnOptions, key_name
from headstart.learn.process import Task
from headstart.learn.texts import Text

if TYPE_CHECKING:
    from headstart.engine.kept_states import KeptStates

_log = logging.getLogger("headstart.learn")
_JUDGE_SECONDS = 5.0
_LOAD_SECONDS = 600.0
_RESTARTS = 3  # of a learner that ended, before learning ends

Swap = Callable[[Path], None]  # gives the running engine another head; raises what speaks against


class Learning:
    """One server's learning, from start to end. Methods may be called in any thread."""

    def __init__(
        self, options: LearnOptions, task: Callable[[Path], Task], *, shares_device: bool = True,
        is_gpu: bool = False,
    ):  # fmt: skip
        """task: what the learner is started with, for the head that serves. shares_device: whether
        the learner runs on the device that serves; is_gpu: whether that is a GPU."""
        assert options.learn is not None
        self._shares_gpu = shares_device and is_gpu
        self.options, self._task, self._shares_device = options, task, shares_device
        self.folder = Folder(options.learn)
        self._lock = self.folder.lock()
        self.heads = LearnedHeads(self.folder)
        self.heads.clear_unfinished()
        self._excluded = frozenset(options.learn_not_for or ())
        self._kinds = Kinds()
        self.collector = Collector(self.folder, int(options.learn_gigabytes * 1e9))
        self._live = LiveWatch()
        self._notes = LiveNotes(self.heads, self._live)
        self._child: Child | None = None
        self._pace: Pace | None = None
        self._swap: Swap | None = None
        self._offered: tuple[str, dict[str, Any]] | None = None  # that is not swapped in yet
        self._end, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="learn-watch", daemon=True)
        self._restarts = 0
        self._to_come = 0  # bytes of memory that the learner will take later
        self._gone: int | None = None  # exit code of a learner that ended
        self.numbers = first_numbers()

    @property
    def serving_name(self) -> str:
        serving = self.heads.serving
        return START if serving is None else serving.name

    @property
    def serving_path(self) -> Path:
        return self.heads.path(self.serving_name)

    def start(self) -> None:
        """Start the learner; it loads its model while the caller loads its own."""
        self.collector.start()
        self._child = self._new_child()
        self._thread.start()

    def _new_child(self) -> Child:
        task = self._task(self.serving_path)
        return Child(task, self._heard, shares_gpu=self._shares_gpu)

    def wait_for_memory(self) -> int:
        """Where both use one device, until the learner has taken its memory: K/V gets the rest,
        less the bytes that are given back here, which it will take later."""
        assert self._child is not None
        if not self._shares_device:
            return 0
        if not self._child.is_ready.wait(_LOAD_SECONDS):
            _log.warning("learning: the learner is not ready after %g s; its memory is not "
                         "counted", _LOAD_SECONDS)  # fmt: skip
        return self._to_come

    def attach(self, swap: Swap, is_busy: Callable[[], bool]) -> None:
        """There is an engine now; returns at once, so that the engine's thread may call it."""
        share = self.options.learn_share if self._shares_device else 1.0
        self._pace = Pace(self._send, share, is_busy, shares_gpu=self._shares_gpu)
        self._pace.start()
        self._swap = swap
        self._wake.set()

    def may_keep(self, key: str | None) -> bool:
        """Whether what this API key sends may be collected."""
        return key is None or not self._excluded or key_name(key) not in self._excluded

    def kind_of(self, prompt: object) -> str:
        """The kind of a request, by its prompt as it was given; for the event loop."""
        return self._kinds.kind_of(prompt)

    def finished(self, walked: Walked, text: Text, states: KeptStates | None = None) -> None:
        """An answer that a client got whole, with the trunk's states where the engine kept them."""
        self.collector.offer(text, states)
        self._live.observe(walked)

    def close(self) -> None:
        self._end.set()
        self._wake.set()
        if self._pace is not None:
            self._pace.close()
        if self._child is not None:
            self._child.close()
        if self._thread.is_alive():
            self._thread.join(1.0)
        if not self._thread.is_alive():  # it may still swap a head, and write them itself
            self._notes.write()
        self.collector.close()
        self._write_status("stopped")
        self._lock.close()

    def facts(self) -> dict[str, Any]:
        """Everything that is shown, for status.json, metrics and the page."""
        pace = self._pace
        share = pace.shared_seconds / pace.busy_seconds if pace and pace.busy_seconds else 0.0
        head = self.heads.serving
        return {
            **self.numbers, "collected": asdict(self.collector.counts), "head": self.serving_name,
            "promise": head.promise if head else {}, "share": share,
            "busy_seconds": pace.busy_seconds if pace else 0.0,
            "shared_seconds": pace.shared_seconds if pace else 0.0,
            "written": time.time(),
        }  # fmt: skip

    def _send(self, number: int) -> None:
        if self._child is not None:
            self._child.send(number)

    def _heard(self, name: str, event: dict[str, Any]) -> None:
        """What the learner says; in its thread."""
        note(self.numbers, name, event, self.serving_name)
        if name == "ready":
            self._to_come = event["to_come"]
        elif name == "kinds":
            self._kinds.know(event["kinds"])
        elif name == "offer":
            self._offered = (event["name"], event["promise"])
            self._wake.set()
        elif name == "gone":
            self._gone = event["code"]
            self._wake.set()

    def _swap_to(self, name: str, promise: dict[str, Any]) -> None:
        assert self._swap is not None and self._child is not None
        before, started = self.serving_name, time.monotonic()
        self._notes.write()
        try:
            self.heads.add(name, promise)
            self._swap(self.heads.path(name))
            self.heads.serve(name)
        except Exception as error:
            _log.warning("learning: head %s is not served (%s); head %s stays", name,
                         first_line(error), before)  # fmt: skip
            self._give_back(before)
            self.numbers["failures"] += 1
            with contextlib.suppress(OSError):  # a disk that is full
                self.heads.take_back(name, first_line(error), "refused")
            self._child.tell("refused")
            return
        self._live.swapped(float(promise.get("first_gain", 0.0)))
        self._notes.begin(name)
        self.numbers["swaps"] += 1
        self._child.tell("serves", head=str(self.heads.path(name)))
        _log.info("learning: head %s serves instead of %s (%.2f s): %s", name, before,
                  time.monotonic() - started, promise["reason"])  # fmt: skip

    def _give_back(self, name: str) -> None:
        """Make sure that this head serves, whatever became of the other; again until it does."""
        assert self._swap is not None
        while not self._end.is_set():
            try:
                self._swap(self.heads.path(name))
                return
            except Exception as error:
                _log.error("learning: head %s could not be given back (%s); it is tried again in "
                           "%g s", name, first_line(error), _JUDGE_SECONDS)  # fmt: skip
            self._end.wait(_JUDGE_SECONDS)

    def _watch(self) -> None:
        """Until the end: swap, judge the serving head by what is served, and write numbers."""
        while not self._end.is_set():
            self._wake.wait(_JUDGE_SECONDS)
            self._wake.clear()
            try:
                self._look()
            except Exception:  # whatever it is, heads must still be judged
                _log.exception("learning: an error that should not be")

    def _look(self) -> None:
        if self._end.is_set():
            return
        if self._swap is not None and self._offered is not None:
            (name, promise), self._offered = self._offered, None
            self._swap_to(name, promise)
        if self._gone is not None:
            self._restart(self._gone)
        gain, reason = self._live.judge()
        self.numbers["live"] = asdict(gain)
        self._notes.now_and_then(gain)
        if reason is not None:
            self._notes.write(gain)
            self._roll_back(reason)
        self._write_status(self.numbers["state"])

    def _roll_back(self, reason: str) -> None:
        assert self._child is not None
        name, before = self.serving_name, self.heads.before
        self._give_back(before)
        with contextlib.suppress(OSError):  # a disk that is full: a restart would find it again
            self.heads.take_back(name, reason)
        self._live.taken_back()
        self._notes.end()
        self.numbers["rollbacks"] += 1
        self._child.tell("serves", head=str(self.heads.path(before)))
        _log.warning("learning: head %s is taken back, head %s serves again: %s", name, before,
                     reason)  # fmt: skip

    def _restart(self, code: int) -> None:
        """In the thread that lives as long as the server: the system ends a child with the thread
        that started it."""
        self._gone = None
        self._restarts += 1
        if self._restarts > _RESTARTS:
            self.numbers["state"] = "ended"
            _log.error("learning: the learner ended (%d) and is not started again; serving goes "
                       "on with head %s", code, self.serving_name)  # fmt: skip
            return
        _log.warning("learning: the learner ended (%d) and is started again", code)
        self._child = self._new_child()

    def _write_status(self, state: str) -> None:
        write_status(self.folder, json.dumps({**self.facts(), "state": state}) + "\n")
