"""What a backend's memory is asked for, and what its passes give."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CacheSizes:
    """Memory that all requests share."""

    num_blocks: int  # of K/V
    block_size: int  # tokens
    num_states: int = 0  # slots of recurrent states; each holds all layers'


@dataclass(frozen=True)
class DeviceBytes:
    """Memory of a device; on a CPU, what this process may still take."""

    free: int
    total: int


@dataclass(frozen=True)
class HeadOutput:
    """What a module gives for its rows [T, hidden], and the last row of each request."""

    normed: Tensor  # for the LM head
    recycled: Tensor  # for the next depth
    last: list[int]


@dataclass(frozen=True)
class DraftChain:
    """Drafts of one request, and the states [K, hidden] of which each feeds the next depth."""

    tokens: list[int]
    states: Tensor
    probs: Tensor | None = None  # [K, V] what they were drawn from, for the rejection rule
