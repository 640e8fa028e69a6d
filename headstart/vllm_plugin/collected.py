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


def read(path: Path) -> Collected:
    """One file, checked; DataError says what is wrong with it."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            facts = opened.metadata() or {}
            num_prompt, kind = int(facts[NUM_PROMPT]), facts.get(KIND) or None
            ids, states = opened.get_tensor(IDS), opened.get_tensor(STATES)
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


class Writing:
    """A thread that writes answers; serving never waits for a disk."""

    def __init__(self, folder: Path, most_bytes: int):
        self._folder, self._left = folder, most_bytes
        self.num_written = self.num_left_out = 0
        self._run = uuid.uuid4().hex[:12]
        self._waiting: queue.Queue[Callable[[], Collected | None]] = queue.Queue(_WAITING)
        folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._work, name="headstart-collect", daemon=True).start()

    def add(self, made: Callable[[], Collected | None]) -> None:
        """`made` is called in the thread; None leaves the answer out."""
        try:
            self._waiting.put_nowait(made)
        except queue.Full:
            self.num_left_out += 1

    def wait(self) -> None:
        """Until all that was added is on disk."""
        self._waiting.join()

    def _work(self) -> None:
        while True:
            made = self._waiting.get()
            try:
                self._write(made())
            except OSError as error:
                self._left = 0
                log.warning("headstart: collecting stops: %s", error.strerror)
            except Exception:
                self.num_left_out += 1
                log.exception("headstart: an answer was not collected")
            finally:
                self._waiting.task_done()

    def _write(self, found: Collected | None) -> None:
        if found is None or self._left <= 0:
            self.num_left_out += 1
            return
        name = f"{self._run}-{self.num_written:08d}"
        self._left -= write(self._folder, name, found)
        self.num_written += 1
        if self._left <= 0:
            log.warning("headstart: collecting stops: %s has its bytes", self._folder)
