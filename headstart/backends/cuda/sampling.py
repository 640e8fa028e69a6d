"""What requests ask of the choice of a token, as device tensors, and choices made from it.

Rounds keep the settings of all their requests in tensors that are made once; a pass over prompts
makes them for its own rows. Both choose by the same kernels: a request may decode in rounds now and
with the host when memory runs short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.backends.cuda.kernels import adjusting
from headstart.backends.cuda.kernels.adjusting import Adjusted, Settings, adjust
from headstart.backends.cuda.kernels.logprobs import MAX_LOGPROBS, logprobs_of
from headstart.backends.cuda.kernels.sampling import draw
from headstart.backends.rows import on_device, pinned_to
from headstart.sampling.masks import num_words, packed
from headstart.sampling.params import Row, SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingNeeds:
    """What the requests of a round need beside the best of all tokens."""

    processes: bool = False  # logits are changed, or cut off, before a choice
    processes_drafts: bool = False  # and before drafts are chosen, where penalties are left out
    has_logprobs: bool = False
    has_masks: bool = False  # of grammars
    rejects: bool = False  # accepts by the rejection rule
    vocabs: tuple[int, ...] = (0,)  # draft vocabularies, by number

    @classmethod
    def of(
        cls, params: SamplingParams, *, has_grammar: bool = False, vocab: int = 0
    ) -> SamplingNeeds:
        """Of one request."""
        uses = _uses(params)
        is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        is_truncated = is_cut and not params.is_greedy
        return cls(
            processes=bool(uses) or is_truncated or has_grammar,
            processes_drafts=bool(uses & ~adjusting.PENALTIES) or is_truncated,
            has_logprobs=params.logprobs is not None, has_masks=has_grammar,
            rejects=bool(uses & adjusting.REJECTS), vocabs=(vocab,),
        )  # fmt: skip

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        """Of a round in which both are."""
        if self == other:  # nearly always, and asked of every request in every round
            return self
        return SamplingNeeds(
            processes=self.processes or other.processes,
            processes_drafts=self.processes_drafts or other.processes_drafts,
            has_logprobs=self.has_logprobs or other.has_logprobs,
            has_masks=self.has_masks or other.has_masks, rejects=self.rejects or other.rejects,
            vocabs=tuple(sorted({*self.vocabs, *other.vocabs})),
        )  # fmt: skip


PLAIN = SamplingNeeds()
_MOST = (1 << 31) - 1


def empty_settings(count: int, vocab: int, device: torch.device) -> Settings:
    """Room for as many requests."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return Settings(
        zeros(adjusting.NUM_NUMBERS, count, dtype=torch.float32),
        zeros(adjusting.NUM_COUNTS, count, dtype=torch.int32), zeros(count, dtype=torch.int64),
        zeros(count, vocab, dtype=torch.int32), zeros(count, vocab, dtype=torch.float32),
    )  # fmt: skip


def set_row(
    settings: Settings, index: int, row: Row, newest: Tensor | None = None, *,
    has_grammar: bool = False,
) -> None:  # fmt: skip
    """Fill an index with what a request's next choice depends on; launched, not waited for.

    newest: an output token that only the device knows yet.
    """
    _write(settings, [index], [row], has_grammar=has_grammar)
    if newest is not None and row.params.has_penalties:
        settings.history[index].index_add_(0, newest.view(1), _outputs(newest.view(1)))


def move_row(settings: Settings, source: int, target: int) -> None:
    """An index takes over what another holds."""
    settings.numbers[:, target] = settings.numbers[:, source]
    settings.counts[:, target] = settings.counts[:, source]
    for part in (settings.seeds, settings.history, settings.bias):
        part[target] = part[source]


def settings_of(rows: Sequence[Row], vocab: int, device: torch.device) -> Settings:
    """Of rows that are not in rounds, each for itself."""
    settings = empty_settings(len(rows), vocab, device)
    _write(settings, list(range(len(rows))), rows)
    return settings


@dataclass(frozen=True)
class Choices:
    """Tokens [n], and what `kernels.logprobs.logprobs_of` gives of them where a row asks."""

    tokens: Tensor
    logprobs: tuple[Tensor, Tensor] | None = None


def choose_rows(logits: Tensor, rows: Sequence[Row], *, with_logprobs: bool = False) -> Choices:
    """From logits [n, V], as a round would choose; the host does not wait."""
    settings, adjusted = _adjusted(logits, rows)
    tokens = draw(adjusted, settings)
    if not with_logprobs or all(row.params.logprobs is None for row in rows):
        return Choices(tokens)
    return Choices(tokens, _logprobs(logits, settings, adjusted, tokens))


def logprobs_of_rows(
    logits: Tensor, ids: Sequence[int], rows: Sequence[Row]
) -> tuple[Tensor, Tensor]:
    """What `kernels.logprobs.logprobs_of` gives of tokens that were chosen before."""
    settings, adjusted = _adjusted(logits, rows)
    return _logprobs(logits, settings, adjusted, on_device(ids, logits.device))


def _adjusted(logits: Tensor, rows: Sequence[Row]) -> tuple[Settings, Adjusted]:
    settings = settings_of(rows, logits.shape[1], logits.device)
    positions = on_device([row.position for row in rows], logits.device)
    masks = bits_of(rows, logits)
    return settings, adjust(logits.unsqueeze(0), settings, positions, masks=masks)


def _logprobs(
    logits: Tensor, settings: Settings, adjusted: Adjusted, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    raw = adjust(logits.unsqueeze(0), settings, adjusted.positions, processes=False)
    return logprobs_of(raw, adjusted, settings, tokens)


def signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _write(
    settings: Settings, indices: list[int], rows: Sequence[Row], *, has_grammar: bool = False
) -> None:
    device, vocab = settings.seeds.device, settings.history.shape[1]
    at = slice(indices[0], indices[-1] + 1) if indices else slice(0)
    numbers = on_device([n for row in rows for n in _numbers(row.params)], device, torch.float32)
    counts = on_device(
        [n for row in rows for n in _counts(row, vocab, has_grammar=has_grammar)],
        device,
        torch.int32,
    )
    settings.numbers[:, at] = numbers.view(len(rows), -1).T
    settings.counts[:, at] = counts.view(len(rows), -1).T
    settings.seeds[at] = on_device([signed(row.seed) for row in rows], device)
    for index, row in zip(indices, rows, strict=True):
        uses = _uses(row.params)
        if uses & (adjusting.PENALTIES | adjusting.ENDS):
            _set_history(settings.history[index], row)
        if uses & adjusting.BIAS:
            given = torch.from_numpy(row.params.restrictions.row(vocab))
            settings.bias[index] = pinned_to(given, device)


def _uses(params: SamplingParams) -> int:
    uses = adjusting.PENALTIES if params.has_penalties else 0
    if params.is_restricted:
        uses |= adjusting.BIAS
    if params.acceptance == "rejection":
        uses |= adjusting.REJECTS
    return uses | (adjusting.ENDS if params.min_tokens else 0)


def _numbers(params: SamplingParams) -> list[float]:
    return [
        1 / params.temperature if params.temperature > 0 else 0.0,
        params.top_p,
        math.log(params.min_p) if params.min_p else -math.inf,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    ]


def _counts(row: Row, vocab: int, *, has_grammar: bool) -> list[int]:
    """As `kernels.adjusting` has them, in 32 bits whatever was asked for."""
    params = row.params
    uses = _uses(params) | (adjusting.MASK if row.mask is not None or has_grammar else 0)
    first_end = row.position - row.num_output + params.min_tokens
    top = -1 if params.logprobs is None else min(params.logprobs, MAX_LOGPROBS, vocab)
    top_k = max(0, params.top_k) if params.top_k < vocab else 0
    is_processed = int(params.logprobs_mode == "processed")
    return [uses, top_k, min(first_end, _MOST), top, is_processed]


def _set_history(history: Tensor, row: Row) -> None:
    """The words of one request [V]: see `kernels/adjusting.py`."""
    history.zero_()
    if row.output_ids:
        outputs = on_device(row.output_ids, history.device)
        history.index_add_(0, outputs, _outputs(outputs))
    bits = (adjusting.IN_PROMPT, list(row.prompt_ids)), (adjusting.IS_END, list(row.end_ids))
    for bit, ids in bits:
        if ids:
            own = on_device(ids, history.device)
            history[own] = history[own] | bit  # an id that comes twice is written twice alike


def _outputs(ids: Tensor) -> Tensor:
    return torch.full_like(ids, adjusting.ONE_OUTPUT, dtype=torch.int32)


def bits_of(rows: Sequence[Row], like: Tensor) -> Tensor | None:
    """Masks of grammars [n, words] as bits, where a row has one."""
    if all(row.mask is None for row in rows):
        return None
    words = np.zeros((len(rows), num_words(like.shape[1])), np.int32)
    for own, row in zip(words, rows, strict=True):
        if row.mask is not None:
            own[: num_words(len(row.mask))] = packed(row.mask)
    return pinned_to(torch.from_numpy(words), like.device)
