"""Which experts a row goes through, and the rows of a pass sorted by expert.

The choice lies beside the counters of its pass, in memory that nothing else uses: a late thread
must not find the choice of a later layer, which would send it to work that is not there.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.passes import number, table, words
from headstart.backends.numba.rows import bits_of, exp, gate, largest
from headstart.backends.numba.thread_pool import COUNTERS, claim, finish, wait

# As ints, for all pairs of a row and an expert [rows, top_k]: the expert, its weight (bits of
# float32), and its place among pairs sorted by expert; the row of each sorted pair; of those
# experts that have rows which they are, and where their pairs begin (one more: where they end).
Routes = namedtuple("Routes", "chosen weights places rows active begins count")


def num_stored(rows: int, top_k: int, num_experts: int) -> int:
    """How many phases' counters the choice of so many rows takes the place of."""
    pairs = rows * top_k
    return -(-(4 * pairs + 2 * min(pairs, num_experts) + 2) // COUNTERS)


num_stored_compiled = njit()(num_stored)


@njit()
def routes_at(counters, phase, rows, top_k, num_experts):
    """The choice whose storage begins at a phase."""
    pairs = rows * top_k
    most = min(pairs, num_experts)
    at = counters[phase:].ctypes.data
    rest = at + 32 * pairs
    return Routes(
        table(at, rows, top_k), table(at + 8 * pairs, rows, top_k),
        table(at + 16 * pairs, rows, top_k), words(at + 24 * pairs, pairs), words(rest, most),
        words(rest + 8 * most, most + 1), words(rest + 16 * most + 8, 1),
    )  # fmt: skip


@njit()
def _scores(logits, is_sigmoid, out):
    """Sigmoids, or soft-max, in place of logits."""
    count = logits.shape[0]
    if is_sigmoid:
        for i in range(count):
            out[i] = gate(logits[i])
        return
    highest, total = largest(logits), np.float32(0)
    for i in range(count):
        out[i] = exp(logits[i] - highest)
    for i in range(count):
        total += out[i]
    for i in range(count):
        out[i] /= total


@njit()
def _two_best(values):
    first, second = np.float32(-np.inf), np.float32(-np.inf)
    for value in values:
        if value > first:
            first, second = value, first
        elif value > second:
            second = value
    return first + (second if values.shape[0] > 1 else np.float32(0))


@njit()
def _best(values):
    """The place of the largest, the first of equal ones."""
    found = 0
    for i in range(1, values.shape[0]):
        found = i if values[i] > values[found] else found
    return found


@njit()
def _rule_out_groups(choosing, groups, top_groups):
    """All but the best groups; a group's score is that of its two best experts."""
    size = choosing.shape[0] // groups
    scores, kept = np.empty(groups, np.float32), np.zeros(groups, np.bool_)
    for group in range(groups):
        scores[group] = _two_best(choosing[group * size : (group + 1) * size])
    for _ in range(top_groups):
        best = _best(scores)
        kept[best], scores[best] = True, -np.inf
    for group in range(groups):
        if not kept[group]:
            for i in range(group * size, (group + 1) * size):
                choosing[i] = -np.inf


@njit(inline="always")
def choose(counters, phase, logits, correction, settings, routes):
    """The experts of each row and their weights: one phase, whose items are rows.

    logits [rows, experts or more]; correction [experts] or nothing; settings: whether scores are
    sigmoids, groups, groups that are kept, whether weights are divided by their sum, what that is
    at least, and the scale of weights, the last two as bits.
    """
    is_sigmoid, groups, top_groups, renormalises, least_sum, scale, experts = settings
    rows, top_k = routes.chosen.shape
    scores, choosing = np.empty(experts, np.float32), np.empty(experts, np.float32)
    weights = np.empty(top_k, np.float32)
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        for row in range(begin, end):
            _scores(logits[row, :experts], is_sigmoid, scores)
            for i in range(experts):
                choosing[i] = scores[i] + (correction[i] if correction.shape[0] else 0)
            if groups > 1:
                _rule_out_groups(choosing, groups, top_groups)
            total = np.float32(0)
            for number_of in range(top_k):
                best = _best(choosing)
                choosing[best] = -np.inf
                routes.chosen[row, number_of] = best
                weights[number_of] = scores[best]
                total += scores[best]
            factor = number(scale)
            if renormalises:
                factor = number(scale) / max(total, number(least_sum))
            for number_of in range(top_k):
                routes.weights[row, number_of] = bits_of(weights[number_of] * factor)
        finish(counters, phase, end - begin)
    wait(counters, phase, rows)


@njit(inline="always")
def sort(counters, phase, routes, num_experts):
    """Pairs by expert, those of an expert by row: one phase with one item."""
    begin, _ = claim(counters, phase, 1)
    if begin == 0:
        rows, top_k = routes.chosen.shape
        counts = np.zeros(num_experts + 1, np.int64)
        for row in range(rows):
            for number_of in range(top_k):
                counts[routes.chosen[row, number_of] + 1] += 1
        active = 0
        for expert in range(num_experts):
            if counts[expert + 1]:
                routes.active[active], routes.begins[active] = expert, counts[expert]
                active += 1
            counts[expert + 1] += counts[expert]
        routes.begins[active], routes.count[0] = rows * top_k, active
        for row in range(rows):
            for number_of in range(top_k):
                expert = routes.chosen[row, number_of]
                routes.places[row, number_of] = counts[expert]
                routes.rows[counts[expert]] = row
                counts[expert] += 1
        finish(counters, phase, 1)
    wait(counters, phase, 1)
