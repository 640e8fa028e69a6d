"""Loading weights in one thread while another runs rounds: without long waits for either.

Eight readers would take turns of milliseconds with the interpreter, which a round needs, too. What
is given to a GPU all at once is computed beside one round, which then takes milliseconds longer: so
work comes in pieces, each done before the next is given, with pauses.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_SWITCH_SECONDS = 5e-4  # that a thread keeps the interpreter while another waits for it
PIECE_VALUES = 1 << 21  # that are sent or computed with at once
_PAUSE_SECONDS = 5e-4  # several times what a piece takes a GPU
_IS_BESIDE: ContextVar[bool] = ContextVar("is_beside", default=False)
_LOCK = threading.Lock()
_BEFORE: list[float] = []  # intervals that threads found which are inside: the first is the usual


@contextmanager
def beside_rounds() -> Iterator[None]:
    """Inside, tensors are read one after another and sent in small pieces."""
    token = _IS_BESIDE.set(True)
    with _LOCK:
        _BEFORE.append(sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        with _LOCK:
            usual = _BEFORE[0]
            _BEFORE.pop()
            if not _BEFORE:
                sys.setswitchinterval(usual)
        _IS_BESIDE.reset(token)


def is_beside() -> bool:
    return _IS_BESIDE.get()


def rows_of_piece(value: Tensor) -> int:
    """How many of a tensor's rows are a piece, while rounds run."""
    return max(1, PIECE_VALUES * len(value) // max(1, value.numel()))


def pause(device: torch.device) -> None:
    """Between two pieces: wait until the device has done the first, and a little longer."""
    if is_beside() and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
        time.sleep(_PAUSE_SECONDS)


def send(value: Tensor, part: Tensor) -> None:
    """Copy `value` into `part`, in its dtype."""
    if not is_beside() or not part.dim():
        part.copy_(value.to(part.dtype))
        return
    size = rows_of_piece(value)
    for at in range(0, len(value), size):
        piece = value[at : at + size].to(part.dtype)
        if part.is_cuda:  # from other memory the driver copies, and rounds may wait for it
            piece = piece.pin_memory()
        part[at : at + size].copy_(piece, non_blocking=True)
        pause(part.device)
