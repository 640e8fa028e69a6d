"""Sizes of a gated delta net (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    k_heads: int  # of queries and keys; each serves several value heads
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int  # rows that the short convolution sees, the newest included

    @property
    def channels(self) -> int:
        """What is convolved: queries, keys and values of all heads."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def conv_values(self) -> int:
        """Numbers in one state of the convolution: the rows that it still has to see."""
        return (self.kernel - 1) * self.channels

    @property
    def memory_values(self) -> int:
        """Numbers in one recurrent state."""
        return self.v_heads * self.k_dim * self.v_dim
