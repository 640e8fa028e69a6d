"""Masks over tokens, as flags and as bits: words of 32 tokens, the lowest bit first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def num_words(num_tokens: int) -> int:
    """Words that hold a bit for each token."""
    return -(-num_tokens // 32)


def packed(mask: Tensor) -> np.ndarray:
    """The bits of a mask, bool [V], as int32 [words]."""
    bits = np.packbits(mask.cpu().numpy(), bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def unpacked(words: np.ndarray, num_tokens: int) -> Tensor:
    """The mask, bool [V], that has these bits."""
    flags = np.unpackbits(words.view(np.uint8), count=num_tokens, bitorder="little")
    return torch.from_numpy(flags.view(np.bool_))
