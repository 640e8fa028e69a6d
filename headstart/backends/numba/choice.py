"""Drafts among the tokens of a list and those of each request, compiled.

A request's choice is that of one draft vocabulary which holds both, its ids in rising order. Where
the best one alone is asked for, the two are compared; else its logits are laid out in that order.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.calls import OUTPUTS, WRITES_ON, multiply
from headstart.backends.numba.candidates import new_scratch
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.noise import argmax
from headstart.backends.numba.rows import copy
from headstart.backends.numba.sampling import FIRST, choose_row
from headstart.backends.numba.sums import TILE
from headstart.backends.numba.thread_pool import claim, finish, wait

# Of each request how many tokens of its own it has [requests]; their LM-head rows as a matrix
# [requests, FIELDS]; by slot their ids; slots in the order of ids, and of each of these how many
# tokens of the list come before it [requests, most]; what kernels write, logits [depths, requests,
# most].
OwnColumns = namedtuple("OwnColumns", "counts matrices ids order places logits")


@njit()
def num_own_phases(rows, own):
    """Of `draft_logits` beside that of the list."""
    return rows if own.ids.shape[1] else 0


@njit()
def draft_logits(counters, phase, normed, lm_head, logits, own, own_logits):
    """logits [rows, list] and own_logits [rows, most]; returns the phase behind the last.

    Products are begun one after another, and waited for at the end.
    """
    rows = normed.shape[0]
    multiply(counters, phase, normed, lm_head.ctypes.data, logits, WRITES_ON)
    for row in range(rows):
        if own.counts[row]:
            multiply(
                counters, phase + 1 + row, normed[row : row + 1], own.matrices[row:].ctypes.data,
                own_logits[row : row + 1], WRITES_ON,
            )  # fmt: skip
    wait(counters, phase, -(-lm_head[0, OUTPUTS] // TILE))
    for row in range(rows):
        if own.counts[row]:
            wait(counters, phase + 1 + row, -(-own.counts[row] // TILE))
    return phase + 1 + num_own_phases(rows, own)


@njit()
def _join(listed, own, order, places, out):
    """Values of a list with those of own slots between them, in the order of their ids."""
    begin = 0
    for i in range(order.shape[0]):
        end = places[i]
        copy(listed[begin:end], out[begin + i : end + i])
        out[end + i] = own[order[i]]
        begin = end
    count = order.shape[0]
    copy(listed[begin:], out[begin + count : listed.shape[0] + count])


@njit()
def _choose_joined(logits, own_logits, settings, row, ahead, tokens, own, scratch, probs, joined):
    """The token of a row that has own tokens; joined: values and ids [list + most] to write to."""
    count, width = own.counts[row], tokens.shape[0] + own.counts[row]
    params = settings.rows[row]
    if params.temperature == 0 and not params.is_adjusted and not probs.shape[0]:
        best, other = argmax(logits), argmax(own_logits[:count])
        token, own_token = np.int64(tokens[best]), np.int64(own.ids[row, other])
        is_own = own_logits[other] > logits[best]
        is_tied = own_logits[other] == logits[best] and own_token < token
        return own_token if is_own or is_tied else token
    values, ids = joined[0][:width], joined[1][:width]
    order, places = own.order[row, :count], own.places[row, :count]
    _join(logits, own_logits, order, places, values)
    _join(tokens, own.ids[row], order, places, ids)
    column = choose_row(values, settings, row, ahead, ids, scratch, probs)
    return np.int64(ids[max(column, 0)])  # where no token is allowed any will do


@njit()
def choose_drafts(counters, phase, logits, own_logits, settings, ahead, tokens, own, probs, chosen):
    """chosen [rows]: the token of each row; probs [rows, all tokens or 0]: one phase."""
    rows, none_yet = logits.shape[0], True
    most = tokens.shape[0] + own.ids.shape[1]
    scratch = new_scratch(FIRST)
    joined = np.empty(FIRST, np.float32), np.empty(FIRST, np.int32)
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        if none_yet:
            scratch, none_yet = new_scratch(most), False
            if own.ids.shape[1]:
                joined = np.empty(most, np.float32), np.empty(most, np.int32)
        for row in range(begin, end):
            if own.counts[row]:
                chosen[row] = _choose_joined(
                    logits[row], own_logits[row], settings, row, ahead, tokens, own, scratch,
                    probs[row], joined,
                )  # fmt: skip
            else:
                column = choose_row(logits[row], settings, row, ahead, tokens, scratch, probs[row])
                chosen[row] = tokens[max(column, 0)]
        finish(counters, phase, end - begin)
    wait(counters, phase, rows)
