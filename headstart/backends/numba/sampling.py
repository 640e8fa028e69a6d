"""The choice of tokens, compiled: rows of logits and settings in, tokens and what is told of them.

`headstart/sampling` is the reference. Each row is treated by one thread in code that knows
nothing of other rows; logits are read, never changed.
"""

from __future__ import annotations

import math

import numpy as np

from headstart.backends.numba.adjusting import adjust
from headstart.backends.numba.candidates import (
    keep_few,
    keep_top,
    new_space,
    scaled,
    truncate,
    weigh,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.noise import best_of, draw, row_key, uniform
from headstart.backends.numba.rows import ONE, copy, fill, largest
from headstart.backends.numba.thread_pool import claim, finish, wait
from headstart.sampling import noise as reference

FIRST = np.int64(0)  # phase, or row ahead; a plain 0 would be a kind of its own to compile for
_NOTHING, _ZERO = np.float32(-np.inf), np.float32(0)
NOTHING_ALLOWED = -1
_CHOICE, _ACCEPTANCE, _RESIDUAL = (
    np.uint64(purpose) for purpose in (reference.CHOICE, reference.ACCEPTANCE, reference.RESIDUAL)
)


@njit()
def _adjusted(logits, settings, row, ahead, tokens, space):
    if not settings.rows[row].is_adjusted:
        return logits
    adjust(logits, settings, row, ahead, tokens, space.adjusted)
    return space.adjusted


@njit(fastmath={"reassoc"})  # the order follows from the number
def _sum(weights):
    total = np.float64(0)
    for i in range(weights.shape[0]):  # over the array itself no vectors would be made
        total += np.float64(weights[i])
    return total


@njit()
def _tell(space, count, is_cut, tokens, probs):
    """The distribution over all tokens that a choice is drawn from."""
    factor = np.float32(1 / _sum(space.weights[:count]))
    if count == probs.shape[0]:  # columns are tokens, which vectors can be made of
        for i in range(count):
            probs[i] = space.weights[i] * factor if space.values[i] > _NOTHING else _ZERO
        return
    fill(probs, _ZERO)
    for i in range(count):
        if space.values[i] > _NOTHING:  # a weight is never nothing
            probs[space.tokens[i] if is_cut else tokens[i]] = space.weights[i] * factor


@njit()
def choose_row(logits, settings, row, ahead, tokens, space, probs):
    """The column of a row's choice, `ahead` tokens behind what `settings` describe.

    NOTHING_ALLOWED where every token is masked. probs [all tokens] gets the distribution that was
    drawn from; it may be empty.
    """
    asked = settings.rows[row]
    values = _adjusted(logits, settings, row, ahead, tokens, space)
    if asked.temperature == 0:
        best = best_of(values)
        if probs.shape[0]:
            fill(probs, _ZERO)
            probs[tokens[best]] = 1
        return best if values[best] > _NOTHING else NOTHING_ALLOWED
    count, is_cut = truncate(values, tokens, asked, space)
    if count == 0:
        fill(probs, _ZERO)
        return NOTHING_ALLOWED
    if probs.shape[0]:
        _tell(space, count, is_cut, tokens, probs)
    key = row_key(asked.seed, asked.position + ahead, _CHOICE)
    named = space.tokens[:count] if is_cut else tokens
    place = draw(space.values[:count], space.weights[:count], named, key)
    return np.int64(space.columns[place]) if is_cut else place


@njit()
def choose_rows(counters, phase, logits, settings, ahead, tokens, probs, chosen):
    """chosen [rows]: the column of each row's choice; probs [rows, all tokens or 0]: one phase."""
    rows, none_yet = logits.shape[0], True
    space = new_space(FIRST)
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        if none_yet:
            space, none_yet = new_space(tokens.shape[0]), False
        for row in range(begin, end):
            chosen[row] = choose_row(logits[row], settings, row, ahead, tokens, space, probs[row])
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
    space, target = new_space(width), np.empty(width, np.float32)
    for row in range(logits.shape[0]):
        choice = choose_row(logits[row], settings, row, FIRST, tokens, space, target)
        if row == drafts.shape[0] or choice == NOTHING_ALLOWED:
            return row, choice
        asked, token = settings.rows[row], drafts[row]
        test = uniform(token, row_key(asked.seed, asked.position, _ACCEPTANCE))
        if not test * draft_probs[row, token] < target[token]:
            key = row_key(asked.seed, asked.position, _RESIDUAL)
            return row, _draw_rest(target, draft_probs[row], tokens, key, space.weights)
    return 0, np.int64(NOTHING_ALLOWED)  # not reached: the row behind the last draft decides


@njit()
def _list(space, count, shift, best, best_values):
    """The candidates by column; where they are fewer than asked for, other columns with -inf."""
    other = passed = 0
    for i in range(best.shape[0]):
        if i < count:
            best[i], best_values[i] = space.columns[i], space.values[i] - shift
            continue
        while passed < count and space.columns[passed] == other:
            passed, other = passed + 1, other + 1
        best[i], best_values[i] = other, _NOTHING
        other += 1


@njit()
def _tell_row(logits, settings, row, tokens, is_processed, token, space, best, best_values):
    """The log-probability of a token, and the best ones of its row."""
    asked, top = settings.rows[row], best.shape[0]
    count, is_cut, temperature = tokens.shape[0], False, ONE
    if is_processed:
        logits = _adjusted(logits, settings, row, FIRST, tokens, space)
        temperature = asked.temperature if asked.temperature > 0 else ONE
    if is_processed and asked.temperature > 0:
        count, is_cut = truncate(logits, tokens, asked, space)
        own = _NOTHING if is_cut or count == 0 else space.values[token]
    else:
        own = scaled(logits[token], weigh(logits, temperature, space), temperature)
    if is_cut:
        for i in range(count):
            own = space.values[i] if space.columns[i] == token else own
    shift = np.float32(math.log(_sum(space.weights[:count]))) if count else _ZERO
    if top:
        if is_cut:
            count = keep_few(space, count, top)
        else:
            count = keep_top(logits, temperature, tokens, top, space)
        _list(space, count, shift, best, best_values)
    return own - shift


@njit()
def tell_rows(counters, logits, at, settings, tokens, is_processed, ids, told, best, best_values):
    """told [rows]: log-probabilities of ids; best and best_values [rows, top], unsorted: one phase.

    Logits of a row are at `at` [rows]. is_processed [rows]: of what the choice was made from, not
    of the logits as they are.
    """
    rows, none_yet = at.shape[0], True
    space = new_space(FIRST)
    while True:
        begin, end = claim(counters, 0, rows)
        if begin >= rows:
            break
        if none_yet:
            space, none_yet = new_space(tokens.shape[0]), False
        for row in range(begin, end):
            told[row] = _tell_row(
                logits[at[row]], settings, row, tokens, is_processed[row], ids[row], space,
                best[row], best_values[row],
            )  # fmt: skip
        finish(counters, 0, end - begin)
    wait(counters, 0, rows)
