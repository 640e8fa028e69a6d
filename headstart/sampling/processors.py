"""What is done to logits before a token is chosen, in the one order that is promised:

    penalties, logit bias, allowed and banned tokens, min_tokens, the grammar's mask,
    temperature, top-k, top-p, min-p

Row j of a round gets what plain decoding would have given it, whatever else is in the batch: each
processor touches only rows that ask for it, and no row's arithmetic depends on the others.

R rows, V tokens. With a draft vocabulary, column i stands for token `token_ids[i]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headstart.sampling.params import Row, SamplingParams
from headstart.sampling.truncation import candidates, column, take


def process(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Log-probabilities [R, V] up to a constant per row, with -inf for what may not be chosen.

    At temperature 0 only penalties, bias and masks apply, and nothing is scaled.
    """
    return finish(adjust(logits, rows), rows)


def adjust(
    logits: Tensor,
    rows: Sequence[Row],
    token_ids: Tensor | None = None,
    *,
    penalties: bool = True,
) -> Tensor:
    """Everything before temperature, in fp32 (fp64 stays); `logits` itself is never changed."""
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    penalised = [i for i, row in enumerate(rows) if penalties and row.params.has_penalties]
    held_back = [i for i, row in enumerate(rows) if row.is_held_back]
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    biased = _by_request(rows)
    if not (penalised or held_back or masked or biased):
        return logits.to(dtype)
    values = logits.to(dtype, copy=True)
    prompts: dict[int, Tensor] = {}
    for i in penalised:
        _penalise(values[i], rows[i], prompts)
    for own in biased:
        _restrict(values, own, rows[own[0]].params, token_ids)
    for i in held_back:
        values[i, _columns(rows[i].end_ids, token_ids, values)] = -math.inf
    for i in masked:
        mask = rows[i].mask
        assert mask is not None
        mask = mask.to(values.device)
        values[i].masked_fill_(~(mask if token_ids is None else mask[token_ids]), -math.inf)
    return values


def scale(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divided by temperature, with the largest value of each row moved to 0.

    Moved first, since at a low temperature the quotients of large logits would have no digits
    left for the noise. A row without any allowed token stays -inf rather than NaN.
    """
    largest = values.amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).min)
    return (values - largest).div_(column([p.temperature for p in params], values))


def finish(adjusted: Tensor, rows: Sequence[Row]) -> Tensor:
    """Temperature and truncation of the rows that are sampled."""
    sampled = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not sampled:
        return adjusted
    params = [rows[i].params for i in sampled]
    result = adjusted.clone()
    for part in candidates(scale(take(adjusted, sampled), params), params):
        values = part.values
        if part.ids is not None:
            nothing = values.new_full((len(part.rows), adjusted.shape[-1]), -math.inf)
            values = nothing.scatter_(-1, part.ids, values)
        result[[sampled[i] for i in part.rows]] = values
    return result


def _by_request(rows: Sequence[Row]) -> list[list[int]]:
    """Rows with bias, allowed or banned tokens, one list for each SamplingParams."""
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        p = row.params
        if p.logit_bias or p.allowed_token_ids is not None or p.banned_token_ids:
            groups.setdefault(id(p), []).append(i)
    return list(groups.values())


def _penalise(values: Tensor, row: Row, prompts: dict[int, Tensor]) -> None:
    """Repetition over prompt and output, then frequency and presence over output, as vLLM does."""
    p = row.params
    output = _ids(row.output_ids, values)
    if p.repetition_penalty != 1:
        # All rows of a request hold the same prompt, which is worth converting only once.
        key = id(row.prompt_ids)
        if key not in prompts:
            prompts[key] = _ids(row.prompt_ids, values)
        seen = torch.cat((prompts[key], output))
        old = values[seen]
        # A token that occurs twice is written twice, with the same value: once is meant.
        values[seen] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        ids, counts = torch.unique(output, return_counts=True)
        values[ids] -= p.frequency_penalty * counts.to(values.dtype) + p.presence_penalty


def _restrict(
    values: Tensor, own: list[int], params: SamplingParams, token_ids: Tensor | None
) -> None:
    """Bias, allowed and banned tokens of one request, on its rows `own`, in place."""
    index = torch.tensor(own, device=values.device).unsqueeze(-1)
    if params.logit_bias:
        places = _columns(params.logit_bias, token_ids, values)
        tokens = places if token_ids is None else token_ids[places]
        amounts = [params.logit_bias[token] for token in tokens.tolist()]
        values[index, places] += torch.tensor(amounts, dtype=values.dtype, device=values.device)
    if params.allowed_token_ids is not None:
        places = _columns(params.allowed_token_ids, token_ids, values)
        kept = values[index, places]
        values[own] = -math.inf
        values[index, places] = kept
    if params.banned_token_ids:
        values[index, _columns(params.banned_token_ids, token_ids, values)] = -math.inf


def _columns(tokens: Iterable[int], token_ids: Tensor | None, like: Tensor) -> Tensor:
    """The columns of `tokens`; under a draft vocabulary, of those that are in it."""
    ids = _ids(tokens, like)
    return ids if token_ids is None else torch.isin(token_ids, ids).nonzero().squeeze(-1)


def _ids(tokens: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)
