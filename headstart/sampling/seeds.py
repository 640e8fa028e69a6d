"""Seeds of samples and prompts, derived from that of a request."""

from __future__ import annotations

MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # odd, from the golden ratio: the step of splitmix64
PROMPT_GAMMA = 0xD1B54A32D192ED03  # another odd step, so that prompts and samples cannot meet


def mix64(word: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit words in which every bit moves all."""
    word &= MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK64
    return word ^ (word >> 31)


def derive_seed(seed: int, sample: int, prompt: int = 0) -> int:
    """The seed of one of n samples (and of one of many prompts): 64 bits, 0 or above.

    Sample 0 of prompt 0 keeps the request's seed, so the first of n answers is the answer of n=1.
    Derive once from both numbers; deriving twice would give (0, 1) and (1, 0) the same noise.
    """
    if sample == 0 and prompt == 0:
        return seed & MASK64
    return mix64(mix64(seed + prompt * PROMPT_GAMMA) + sample * GAMMA)
