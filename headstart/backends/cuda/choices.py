"""Choices of tokens outside captured rounds that must equal those inside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.kernels.choice import MAX_TOP_K
from headstart.backends.rows import on_device
from headstart.sampling.params import SamplingParams
from headstart.sampling.rows import Row


def needs_truncation(params: SamplingParams) -> bool:
    """Whether a choice is not among all tokens."""
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return is_cut and not params.is_greedy


def in_rounds(params: SamplingParams) -> bool:
    """Whether a round can choose: from logits and noise, with no history, bias or mask."""
    return (
        not params.needs_history
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not params.banned_token_ids
        and (not needs_truncation(params) or 0 < params.top_k <= MAX_TOP_K)
    )


def choose_rows(kernels: Kernels, logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """[n] choices as a round would make them; the host does not wait."""
    params, device = [row.params for row in rows], logits.device

    def floats(values: Sequence[float]) -> Tensor:
        return on_device(values, device, torch.float32)

    return kernels.choose_truncated(
        logits, floats([1 / p.temperature if p.temperature > 0 else 0.0 for p in params]),
        on_device([signed(row.seed) for row in rows], device),
        on_device([row.position for row in rows], device),
        on_device([max(0, p.top_k) for p in params], device),
        floats([p.top_p for p in params]), floats([p.min_p for p in params]),
    )  # fmt: skip


def signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
