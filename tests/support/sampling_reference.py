"""What the sampling tests share: slow, plain versions of everything, and a chi-square bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.sampling.params import SamplingParams

INF = math.inf


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, float]:
    """The statistic of observed counts against probabilities, and its bound at p = 1e-5.

    Cells that should be empty must be. The bound is Wilson and Hilferty's approximation.
    """
    counts, probs = counts.double().flatten(), probs.double().flatten()
    assert counts[probs < 1e-12].sum() == 0, "a token of probability 0 was emitted"
    counts, probs = counts[probs >= 1e-12], probs[probs >= 1e-12]
    expected = probs / probs.sum() * counts.sum()
    # Cells with few expected counts are pooled, as the approximation asks.
    rare = expected < 5
    if rare.any():
        pooled_counts = torch.cat((counts[~rare], counts[rare].sum().view(1)))
        pooled = torch.cat((expected[~rare], expected[rare].sum().view(1)))
        counts, expected = pooled_counts, pooled
    freedom = len(expected) - 1
    if freedom == 0:
        return 0.0, 1.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    term = 2 / (9 * freedom)
    return statistic, freedom * (1 - term + 4.265 * math.sqrt(term)) ** 3


def reference_process(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Sequence[int] = (),
    mask: Sequence[bool] | None = None,
) -> tuple[list[float], float]:
    """Processed values of one row, and how close top-p came to keeping one token more or less."""
    p, x = params, list(logits)
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token in set(output):
        x[token] -= p.frequency_penalty * list(output).count(token) + p.presence_penalty
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        is_allowed = p.allowed_token_ids is None or token in p.allowed_token_ids
        is_banned = token in (p.banned_token_ids or ())
        is_early = len(output) < p.min_tokens and token in end_ids
        if not is_allowed or is_banned or is_early or (mask is not None and not mask[token]):
            x[token] = -INF
    if p.temperature == 0 or max(x) == -INF:
        return x, INF
    x = [(v - max(x)) / p.temperature for v in x]
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if p.top_k > 0:
        order = order[: p.top_k]
    margin = INF
    if p.top_p < 1:
        total = sum(math.exp(x[token]) for token in order)
        reached, kept = 0.0, []
        for token in order:
            margin = min(margin, abs(reached - p.top_p))
            if kept and reached >= p.top_p:
                break
            kept.append(token)
            reached += math.exp(x[token]) / total
        margin = min(margin, abs(reached - p.top_p))
        order = kept
    if p.min_p > 0:
        order = [token for token in order if math.exp(x[token]) >= p.min_p]
    return [v if token in order else -INF for token, v in enumerate(x)], margin


def reference_probs(logits: Sequence[float], params: SamplingParams, **history: object) -> Tensor:
    values, _ = reference_process(logits, params, **history)
    return torch.tensor(values, dtype=torch.float64).softmax(-1)


M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def reference_bits(seed: int, position: int, token: int, purpose: int = 0) -> int:
    """The generator once more, in plain integers and without any name from the package."""

    def mix64(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & M64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & M64
        return word ^ (word >> 31)

    def mix32(word: int) -> int:
        word = ((word ^ (word >> 16)) * 0x7FEB352D) & M32
        word = ((word ^ (word >> 15)) * 0x846CA68B) & M32
        return word ^ (word >> 16)

    key = mix64((seed + 0x9E3779B97F4A7C15) & M64)
    key = (key + position * 0x9E3779B97F4A7C15 + purpose * 0x8CB92BA72F3D8DD7) & M64
    key = mix64(key)
    return mix32(mix32(token ^ (key & M32)) ^ (key >> 32))
