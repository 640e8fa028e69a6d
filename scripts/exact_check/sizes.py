"""How large everything is that the check runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    intermediate: int = 11008
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 151680
    positions: int = 32768
    context: int = 3000  # of the longest row
    rows: int = 40
    tokens: int = 40  # of an answer
    prompts: int = 10

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


SMALL = Sizes(64, 96, 2, 1, 16, 96, 300, 280, rows=6, tokens=5, prompts=3)
