"""Penalties, logit bias, allowed and banned tokens, min_tokens and masks of one row, in that order.

`tokens` are the ids of a row's columns, in rising order: all, or those of a draft vocabulary.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.rows import copy

# What some rows ask for. rows: records of settings.ROW; of each list of a row (HISTORY and so on)
# where it lies in ids and amounts: bounds [rows, LISTS, 2]; masks [any number, all tokens], where
# they allow a token.
Settings = namedtuple("Settings", "rows bounds ids amounts masks")
HISTORY, DRAFTS, BIAS, BANNED, ENDS = range(5)
LISTS = 5
_NOTHING = np.float32(-np.inf)


@njit()
def _part(settings, row, number):
    """Ids of a list, and with each an amount."""
    begin, end = settings.bounds[row, number, 0], settings.bounds[row, number, 1]
    return settings.ids[begin:end], settings.amounts[begin:end]


@njit()
def _column(tokens, token):
    """Where a token stands, or -1."""
    low, high = 0, tokens.shape[0]
    if token < high and tokens[token] == token:
        return np.int64(token)
    while low < high:
        middle = (low + high) // 2
        if tokens[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low if low < tokens.shape[0] and tokens[low] == token else -1


@njit()
def _penalised(value, count, params):
    """Of a token that is in the prompt, or `count` times in the output."""
    if params.repetition != 1:
        value = value / params.repetition if value > 0 else value * params.repetition
    if count > 0:
        value -= params.frequency * np.float32(count) + params.presence
    return value


@njit()
def _penalise(logits, settings, row, out):
    """Tokens before the row: what the request has counted, then the drafts, which are few."""
    params = settings.rows[row]
    seen, counts = _part(settings, row, HISTORY)
    drafts, _ = _part(settings, row, DRAFTS)
    for i in range(seen.shape[0]):
        out[seen[i]] = _penalised(logits[seen[i]], counts[i], params)
    for number in range(drafts.shape[0]):
        token, count = drafts[number], np.float32(0)
        for i in range(seen.shape[0]):
            if seen[i] == token:
                count = counts[i]
        for other in drafts:
            count += np.float32(other == token)
        out[token] = _penalised(logits[token], count, params)


@njit()
def _forbid(listed, tokens, out):
    for token in listed:
        column = _column(tokens, token)
        if column >= 0:
            out[column] = _NOTHING


@njit()
def _restrict(mask, tokens, out):
    """To the tokens of a mask."""
    if tokens.shape[0] == mask.shape[0]:
        for column in range(tokens.shape[0]):
            out[column] = out[column] if mask[column] else _NOTHING
    else:
        for column in range(tokens.shape[0]):
            out[column] = out[column] if mask[tokens[column]] else _NOTHING


@njit()
def adjust(logits, settings, row, ahead, tokens, out):
    """out [columns]: the logits of a row `ahead` tokens behind the one that `settings` describe,
    which a grammar's mask holds for alone.
    """
    params = settings.rows[row]
    copy(logits, out)
    if params.is_penalised:
        _penalise(logits, settings, row, out)
    listed, amounts = _part(settings, row, BIAS)
    for i in range(listed.shape[0]):
        column = _column(tokens, listed[i])
        if column >= 0:
            out[column] += amounts[i]
    if params.allowed >= 0:
        _restrict(settings.masks[params.allowed], tokens, out)
    _forbid(_part(settings, row, BANNED)[0], tokens, out)
    if ahead < params.held_back:
        _forbid(_part(settings, row, ENDS)[0], tokens, out)
    if params.mask >= 0 and ahead == 0:
        _restrict(settings.masks[params.mask], tokens, out)
