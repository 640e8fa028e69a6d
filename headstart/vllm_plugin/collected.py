"""Files of collected answers: token ids and the target's states of each, one file an answer.

`headstart distill --import` makes a dataset of a folder of them. Files appear whole, under names
that tell their order; nothing else is ever in the folder but a name that begins with a dot.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from headstart.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("vllm.headstart")
SUFFIX = ".safetensors"
IDS, STATES, NUM_PROMPT, KIND = "ids", "states", "num_prompt", "hidden_kind"
_WAITING = 64  # answers that were copied and not written yet; more are left out
_MOST_HELD = 4 * 2**30  # bytes of memory that they may take
DEFAULT_BYTES = 100 * 2**30
StateKind = Literal["before_final_norm", "after_final_norm"]
KINDS: tuple[StateKind, ...] = get_args(StateKind)


@dataclass(frozen=True)
class Collected:
    """One answer with its prompt."""

    ids: Tensor  # [T] int32
    states: Tensor  # [T, width]
    num_prompt: int
    # before or after the trunk's last norm; None: what vLLM gives to its drafts
    kind: StateKind | None = None


def write(folder: Path, name: str, found: Collected) -> int:
    """Bytes that were written."""
    from safetensors.torch import save

    data = save(
        {IDS: found.ids.int().contiguous(), STATES: found.states.contiguous()},
        metadata={NUM_PROMPT: str(found.num_prompt), KIND: found.kind or ""},
    )
    path = folder / f"{name}{SUFFIX}"
    unfinished = path.with_name(f".{path.name}")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(data)


def files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one that vLLM collected answers in.")
    return sorted(p for p in folder.glob(f"*{SUFFIX}") if not p.name.startswith("."))


def read(path: Path, *, with_states: bool = True) -> Collected:
    """One file, checked; DataError says what is wrong with it.

    Without states nothing of them is read but their shape: they are tensors without values.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            facts = opened.metadata() or {}
            num_prompt, kind = int(facts[NUM_PROMPT]), facts.get(KIND) or None
            ids = opened.get_tensor(IDS)
            if with_states:
                states = opened.get_tensor(STATES)
            else:
                states = torch.empty(opened.get_slice(STATES).get_shape(), device="meta")
    except (OSError, SafetensorError, KeyError, ValueError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is no collected answer ({error}). Remove it.") from error
    if ids.dtype != torch.int32 or ids.dim() != 1 or states.shape[:-1] != ids.shape:
        raise DataError(
            f"{path} has ids {tuple(ids.shape)} and states {tuple(states.shape)}; expected a state "
            "for each id. Remove it."
        )
    if not 0 < num_prompt < len(ids):
        raise DataError(f"{path} has {num_prompt} prompt tokens of {len(ids)}. Remove it.")
    if kind not in (None, *KINDS):
        raise DataError(f"{path} says that its states are {kind!r}. Remove it.")
    return Collected(ids, states, num_prompt, kind)


Made = Callable[[], Collected | None]  # an answer, as soon as its copies are done


class Writing:
    """A thread that writes answers; serving never waits for a disk."""

    def __init__(self, folder: Path, most_bytes: int):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # of users' texts
        self._folder = folder
        self._left = most_bytes - sum(path.stat().st_size for path in files(folder))
        if self._left <= 0:
            log.warning("headstart: nothing is collected: %s has its bytes already", folder)
        self._held = 0
        self._lock = threading.Lock()  # over what is counted in both threads
        self.num_written = self.num_left_out = 0
        self._run = uuid.uuid4().hex[:12]
        self._waiting: queue.Queue[tuple[Made, int]] = queue.Queue(_WAITING)
        threading.Thread(target=self._work, name="headstart-collect", daemon=True).start()

    def has_room(self, num_bytes: int) -> bool:
        """Whether an answer of that size may be copied now; to be asked before it is."""
        fits = self._held + num_bytes <= _MOST_HELD
        return fits and self._left > 0 and not self._waiting.full()

    def leave_out(self) -> None:
        with self._lock:
            self.num_left_out += 1

    def add(self, made: Made, num_bytes: int) -> None:
        """Of an answer that has room; `made` is called in the thread, None leaves it out."""
        with self._lock:
            self._held += num_bytes
        self._waiting.put((made, num_bytes))

    def wait(self) -> None:
        """Until all that was added is on disk."""
        self._waiting.join()

    def _work(self) -> None:
        while True:
            made, num_bytes = self._waiting.get()
            try:
                self._write(made())
            except OSError as error:
                self._left = 0
                log.warning("headstart: collecting stops: %s", error.strerror)
            except Exception:
                self.leave_out()
                log.exception("headstart: an answer was not collected")
            finally:
                del made  # and its copies
                with self._lock:
                    self._held -= num_bytes
                self._waiting.task_done()

    def _write(self, found: Collected | None) -> None:
        if found is None or self._left <= 0:
            self.leave_out()
            return
        name = f"{self._run}-{self.num_written:08d}"
        self._left -= write(self._folder, name, found)
        self.num_written += 1
        if self._left <= 0:
            log.warning("headstart: collecting stops: %s has its bytes", self._folder)
