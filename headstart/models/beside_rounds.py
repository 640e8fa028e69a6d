"""Loading weights in one thread while another runs rounds: without long waits for either.

Eight readers would take turns of milliseconds with the interpreter, which a round needs, too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_SWITCH_SECONDS = 5e-4  # that a thread keeps the interpreter while another waits for it
_PIECE_VALUES = 1 << 21  # that are sent at once
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


def send(value: Tensor, part: Tensor) -> None:
    """Copy `value` into `part`, in its dtype."""
    if not is_beside() or not part.dim():
        part.copy_(value.to(part.dtype))
        return
    size = max(1, _PIECE_VALUES * len(value) // max(1, value.numel()))
    for at in range(0, len(value), size):
        part[at : at + size].copy_(value[at : at + size].to(part.dtype))
