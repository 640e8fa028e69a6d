"""What a head is asked: rows of its modules, or whole chains of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headstart.engine.request import Request


@dataclass(frozen=True)
class HeadRows:
    """Rows of one request for one module of the head: slots [start, start + len(tokens))."""

    request: Request
    start: int
    tokens: list[int]
    states: torch.Tensor  # [n, hidden]


# Each request's first rows and number of drafts, most first; a draft vocabulary -> their drafts.
DraftChain = Callable[[Sequence[HeadRows], Sequence[int], str | None], list[list[int]]]
