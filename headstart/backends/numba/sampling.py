"""The choice of tokens, compiled: from logits and settings to tokens and their log-probabilities.

`headstart/sampling` is the reference. Each row is treated by one thread in code that knows
nothing of other rows; logits are read, never changed.
"""

from __future__ import annotations

import math

import numpy as np

from headstart.backends.numba.adjusting import adjust
from headstart.backends.numba.candidates import (
    keep_top,
    keep_top_of,
    new_scratch,
    scaled,
    truncate,
    write_weights,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.noise import argmax, draw, row_key, uniform
from headstart.backends.numba.rows import ONE, copy, fill, largest
from headstart.backends.numba.thread_pool import claim, finish, wait
from headstart.sampling import noise as reference
from headstart.sampling.choose import NOTHING_ALLOWED

FIRST = np.int64(0)  # a phase, layer or row; a plain 0 would be a kind of its own to compile for
_NOTHING, _ZERO = np.float32(-np.inf), np.float32(0)
_CHOICE, _ACCEPTANCE, _RESIDUAL = (
    np.uint64(purpose) for purpose in (reference.CHOICE, reference.ACCEPTANCE, reference.RESIDUAL)
)


@njit()
def _adjusted(logits, settings, row, ahead, tokens, scratch):
    if not settings.rows[row].is_adjusted:
        return logits
    adjust(logits, settings, row, ahead, tokens, scratch.adjusted)
    return scratch.adjusted


@njit(fastmath={"reassoc"})  # the order follows from the number
def _sum(weights):
    total = np.float64(0)
    for i in range(weights.shape[0]):  # over the array itself no vectors would be made
        total += np.float64(weights[i])
    return total


@njit()
def _write_probs(scratch, count, is_cut, tokens, probs):
    """probs [all tokens]: the distribution that a choice is drawn from."""
    factor = np.float32(1 / _sum(scratch.weights[:count]))
    if count == probs.shape[0]:  # columns are tokens, which vectors can be made of
        for i in range(count):
            probs[i] = scratch.weights[i] * factor if scratch.values[i] > _NOTHING else _ZERO
        return
    fill(probs, _ZERO)
    for i in range(count):
        if scratch.values[i] > _NOTHING:  # a weight is never nothing
            probs[scratch.tokens[i] if is_cut else tokens[i]] = scratch.weights[i] * factor


@njit()
def choose_row(logits, settings, row, ahead, tokens, scratch, probs):
    """The column of a row's choice, `ahead` tokens behind what `settings` describe.

    NOTHING_ALLOWED where every token is masked. probs [all tokens] gets the distribution that was
    drawn from; it may be empty.
    """
    params = settings.rows[row]
    values = _adjusted(logits, settings, row, ahead, tokens, scratch)
    if params.temperature == 0:
        best = argmax(values)
        if probs.shape[0]:
            fill(probs, _ZERO)
            probs[tokens[best]] = 1
        return best if values[best] > _NOTHING else NOTHING_ALLOWED
    count, is_cut = truncate(values, tokens, params, scratch)
    if count == 0:
        fill(probs, _ZERO)
        return NOTHING_ALLOWED
    if probs.shape[0]:
        _write_probs(scratch, count, is_cut, tokens, probs)
    key = row_key(params.seed, params.position + ahead, _CHOICE)
    ids = scratch.tokens[:count] if is_cut else tokens
    place = draw(scratch.values[:count], scratch.weights[:count], ids, key)
    return np.int64(scratch.columns[place]) if is_cut else place


@njit()
def choose_rows(counters, phase, logits, settings, ahead, tokens, probs, chosen):
    """chosen [rows]: the column of each row's choice; probs [rows, all tokens or 0]: one phase."""
    rows, none_yet = logits.shape[0], True
    scratch = new_scratch(FIRST)
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        if none_yet:
            scratch, none_yet = new_scratch(tokens.shape[0]), False
        for row in range(begin, end):
            chosen[row] = choose_row(logits[row], settings, row, ahead, tokens, scratch, probs[row])
        finish(counters, phase, end - begin)
    wait(counters, phase, rows)


@njit()
def _draw_rest(target, draft, tokens, key, rest):
    """From max(target - draft, 0), or from the target where rounding leaves nothing."""
    for i in range(rest.shape[0]):
        left = target[i] - draft[i]
        rest[i] = left if left > 0 else _ZERO
    highest = largest(rest)
    if highest == 0:
        copy(target, rest)
        highest = largest(rest)
    for i in range(rest.shape[0]):
        rest[i] = rest[i] / highest
    return draw(rest[:0], rest, tokens, key)


@njit()
def reject(logits, settings, tokens, drafts, draft_probs):
    """Accepted drafts of one request, and the token that follows them.

    logits [drafts + 1, tokens], with a row of settings for each; draft_probs [drafts, tokens]:
    what each draft was drawn from.
    """
    width = tokens.shape[0]
    scratch, target = new_scratch(width), np.empty(width, np.float32)
    for row in range(logits.shape[0]):
        choice = choose_row(logits[row], settings, row, FIRST, tokens, scratch, target)
        if row == drafts.shape[0] or choice == NOTHING_ALLOWED:
            return row, choice
        params, token = settings.rows[row], drafts[row]
        test = uniform(token, row_key(params.seed, params.position, _ACCEPTANCE))
        if not test * draft_probs[row, token] < target[token]:
            key = row_key(params.seed, params.position, _RESIDUAL)
            return row, _draw_rest(target, draft_probs[row], tokens, key, scratch.weights)
    return 0, np.int64(NOTHING_ALLOWED)  # not reached: the row behind the last draft decides


@njit()
def _list(scratch, count, shift, best, best_values):
    """The candidates by column; where they are fewer than asked for, other columns with -inf."""
    other = passed = 0
    for i in range(best.shape[0]):
        if i < count:
            best[i], best_values[i] = scratch.columns[i], scratch.values[i] - shift
            continue
        while passed < count and scratch.columns[passed] == other:
            passed, other = passed + 1, other + 1
        best[i], best_values[i] = other, _NOTHING
        other += 1


@njit()
def _row_logprobs(logits, settings, row, tokens, is_processed, token, scratch, best, best_values):
    """The log-probability of a token, and the best ones of its row."""
    params, top = settings.rows[row], best.shape[0]
    count, is_cut, temperature = tokens.shape[0], False, ONE
    if is_processed:
        logits = _adjusted(logits, settings, row, FIRST, tokens, scratch)
        temperature = params.temperature if params.temperature > 0 else ONE
    if is_processed and params.temperature > 0:
        count, is_cut = truncate(logits, tokens, params, scratch)
        own = _NOTHING if is_cut or count == 0 else scratch.values[token]
    else:
        own = scaled(logits[token], write_weights(logits, temperature, scratch), temperature)
    if is_cut:
        for i in range(count):
            own = scratch.values[i] if scratch.columns[i] == token else own
    shift = np.float32(math.log(_sum(scratch.weights[:count]))) if count else _ZERO
    if top:
        if is_cut:
            count = keep_top_of(scratch, count, top)
        else:
            count = keep_top(logits, temperature, tokens, top, scratch)
        _list(scratch, count, shift, best, best_values)
    return own - shift


@njit()
def logprobs_of_rows(
    counters, logits, at, settings, tokens, is_processed, ids, logprobs, best, best_values
):
    """logprobs [rows]: of ids; best and best_values [rows, top], unsorted: one phase.

    Logits of a row are at `at` [rows]. is_processed [rows]: of what the choice was made from, not
    of the logits as they are.
    """
    rows, none_yet = at.shape[0], True
    scratch = new_scratch(FIRST)
    while True:
        begin, end = claim(counters, 0, rows)
        if begin >= rows:
            break
        if none_yet:
            scratch, none_yet = new_scratch(tokens.shape[0]), False
        for row in range(begin, end):
            logprobs[row] = _row_logprobs(
                logits[at[row]], settings, row, tokens, is_processed[row], ids[row], scratch,
                best[row], best_values[row],
            )  # fmt: skip
        finish(counters, 0, end - begin)
    wait(counters, 0, rows)
