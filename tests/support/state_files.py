"""Texts and states for tests of what learning keeps beside texts."""

from __future__ import annotations

import torch

from headstart.data.records import Record
from headstart.learn.texts import Text


def record(name: str, num_tokens: int) -> Record:
    """A text whose first token is the prompt."""
    return Text(
        id=name, prompt=[0], answer=list(range(1, num_tokens)), kind="", time=0.0,
        finish_reason="stop",
    ).record()  # fmt: skip


def rows(count: int, seed: int, width: int = 4) -> torch.Tensor:
    """States [count, width] that differ from those of another seed."""
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.bfloat16)
