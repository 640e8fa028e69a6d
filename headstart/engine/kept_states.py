"""The trunk's states of one request, kept as they come: a head that learns from it needs them.

Only where the host sees the states of all tokens, and only for requests that ask for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.models.unroll import StateKind


class KeptStates:
    """States of slots 0, 1, ... without a gap, in bf16.

    Slots that a prefix hit skipped were never computed for this request: what comes after them is
    not kept. After a preemption slots are computed again; those that are known stay.
    """

    def __init__(self, kind: StateKind) -> None:
        self.kind = kind  # which state of the trunk
        self._parts: list[Tensor] = []
        self._count = 0

    def read(self, start: int, rows: Tensor) -> None:
        """Rows [n, D] of accepted slots from `start` on."""
        new = rows[max(0, self._count - start) :]
        if start > self._count or not len(new):
            return
        part = new.to(torch.bfloat16)
        # A view would keep the whole pass alive.
        self._parts.append(part.clone() if part is new else part)
        self._count += len(part)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def of(self, num_tokens: int) -> Tensor | None:
        """[n, D] of a text of so many tokens; None where some are missing.

        The last token has no state where the answer ended with it, and nothing needs that one.
        """
        if not self._parts or self._count < num_tokens - 1:
            return None
        return torch.cat(self._parts)[:num_tokens]
