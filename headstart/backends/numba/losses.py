"""What losses of draft rows read and write on a CPU, compiled: one row of logits at a time.

A row and its distributions stay in a cache: the logits are read for the sums, and read again when
they are overwritten with the gradient. Logits are float32, or bfloat16 given as int16 bits.

n rows, S tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from headstart.backends.losses import Mixture, RowSums
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.noise import argmax
from headstart.backends.numba.rows import exp
from headstart.backends.numba.thread_pool import POOL, claim, finish, new_counters, wait

_WORK = 12  # of one token of a row, in products: as for a choice (`chooser.py`)
_SUMS = 6  # numbers of a row
_INT32 = ir.IntType(32)
_NO_ROWS: dict[torch.dtype, np.ndarray] = {
    torch.bfloat16: np.zeros((0, 0), np.int16),
    torch.float32: np.zeros((0, 0), np.float32),
}


def row_sums(
    logits: Tensor,
    places: Tensor | None = None,
    target: Tensor | None = None,
    target_norm: Tensor | None = None,
) -> RowSums:
    """See `LossKernels`. A row that holds what is no finite number has NaN in all of these."""
    assert places is None or not len(places) or int(places.min()) >= 0
    rows = len(logits)
    numbers = np.full((_SUMS, rows), np.nan, np.float32)
    best = np.empty(rows, np.int64)
    POOL.run(
        _WORK * logits.numel(), _sum_rows, new_counters(1), _bits(logits), _whole(places),
        *_compared(logits, target, target_norm), numbers, best,
    )  # fmt: skip
    return RowSums(
        torch.from_numpy(numbers[0]), torch.from_numpy(best), *map(torch.from_numpy, numbers[1:])
    )


def mix_(
    logits: Tensor,
    log_norm: Tensor,
    mixture: Mixture,
    places: Tensor,
    target: Tensor | None = None,
    target_norm: Tensor | None = None,
) -> Tensor:
    """See `LossKernels`."""
    parts = (mixture.draft, mixture.target, mixture.below, mixture.label)
    weights = np.zeros((len(parts), len(logits)), np.float32)
    for row, part in zip(weights, parts, strict=True):
        if part is not None:
            row[:] = part.float().numpy()
    POOL.run(
        _WORK * logits.numel(), _mix_rows, new_counters(1), _bits(logits), log_norm.numpy(),
        weights, _whole(places), *_compared(logits, target, target_norm),
    )  # fmt: skip
    return logits


def _bits(logits: Tensor) -> np.ndarray:
    """The same memory as numpy has it, which knows no bfloat16."""
    assert logits.is_contiguous()
    logits = logits.detach()
    is_narrow = logits.dtype == torch.bfloat16
    return np.asarray((logits.view(torch.int16) if is_narrow else logits).numpy())


def _whole(places: Tensor | None) -> np.ndarray:
    return np.zeros(0, np.int64) if places is None else np.asarray(places.contiguous().numpy())


def _compared(
    logits: Tensor, target: Tensor | None, target_norm: Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    if target is None or target_norm is None:
        return _NO_ROWS[logits.dtype], np.zeros(0, np.float32)
    return _bits(target), np.asarray(target_norm.float().contiguous().numpy())


@intrinsic
def _wide(typing: Any, number: Any) -> tuple[Any, Any]:
    """A logit as float32."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        if number != types.int16:
            return arguments[0]
        bits = build.shl(build.zext(arguments[0], _INT32), _INT32(16))
        return build.bitcast(bits, ir.FloatType())

    return types.float32(number), generate


@intrinsic
def _stored(typing: Any, number: Any, like: Any) -> tuple[Any, Any]:
    """A float32 as the logit `like` is stored; ties of rounding go to even bits."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        if like != types.int16:
            return arguments[0]
        bits = build.bitcast(arguments[0], _INT32)
        odd = build.and_(build.lshr(bits, _INT32(16)), _INT32(1))
        rounded = build.add(build.add(bits, _INT32(0x7FFF)), odd)
        return build.trunc(build.lshr(rounded, _INT32(16)), ir.IntType(16))

    return like(number, like), generate


@njit()
def _widen(row, out):
    for i in range(row.shape[0]):
        out[i] = _wide(row[i])


@njit()
def _shares(logits, log_norm, out):
    """The soft-max of a row, whose normaliser is known."""
    for i in range(logits.shape[0]):
        out[i] = exp(logits[i] - log_norm)


@njit(fastmath={"reassoc", "contract"})
def _total(row):
    total = np.float32(0)
    for i in range(row.shape[0]):
        total += row[i]
    return total


@njit(fastmath={"reassoc", "contract"})
def _common(q, p):
    """Sums of min(p, q), of q where q <= p, and of p."""
    overlap, below, mass = np.float32(0), np.float32(0), np.float32(0)
    for i in range(q.shape[0]):
        overlap += q[i] if q[i] < p[i] else p[i]
        below += q[i] if q[i] <= p[i] else np.float32(0)
        mass += p[i]
    return overlap, below, mass


@njit(fastmath={"reassoc", "contract"})
def _cross(p, p_logits, p_norm, q_logits, q_norm):
    total = np.float32(0)
    for i in range(p.shape[0]):
        total += p[i] * ((p_logits[i] - p_norm) - (q_logits[i] - q_norm))
    return total


@njit()
def _sum_rows(counters, logits, places, target, target_norm, numbers, best):
    rows, width = logits.shape
    row, taught = np.empty(width, np.float32), np.empty(width, np.float32)
    q, p = np.empty(width, np.float32), np.empty(width, np.float32)
    while True:
        begin, end = claim(counters, 0, rows)
        if begin >= rows:
            break
        for r in range(begin, end):
            _widen(logits[r], row)
            best[r] = argmax(row)
            highest = row[best[r]]
            _shares(row, highest, q)
            norm = highest + np.float32(math.log(_total(q)))
            spoiled = _total(row)  # not finite where a logit is not, of which `exp` says nothing
            if target.shape[0]:
                _widen(target[r], taught)
                spoiled += _total(taught)
            if not math.isfinite(spoiled):
                continue  # NaN in all numbers
            numbers[0, r] = norm
            if places.shape[0]:
                numbers[1, r] = row[places[r]] - norm
            if target.shape[0]:
                _shares(row, norm, q)
                _shares(taught, target_norm[r], p)
                numbers[2, r], numbers[3, r], numbers[4, r] = _common(q, p)
                numbers[5, r] = _cross(p, taught, target_norm[r], row, norm)
        finish(counters, 0, end - begin)
    wait(counters, 0, rows)


@njit()
def _mix_rows(counters, logits, log_norm, weights, places, target, target_norm):
    rows, width = logits.shape
    row, q, p = (
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.zeros(width, np.float32),
    )
    while True:
        begin, end = claim(counters, 0, rows)
        if begin >= rows:
            break
        for r in range(begin, end):
            _widen(logits[r], row)
            _shares(row, log_norm[r], q)
            if target.shape[0]:
                _widen(target[r], row)
                _shares(row, target_norm[r], p)
            draft, of_target, below = weights[0, r], weights[1, r], weights[2, r]
            if math.isnan(log_norm[r]):
                draft = log_norm[r]  # and so the whole gradient is NaN
            for i in range(width):
                share = draft + (below if q[i] <= p[i] else np.float32(0))
                row[i] = share * q[i] + of_target * p[i]
            row[places[r]] += weights[3, r]
            out = logits[r]
            for i in range(width):
                out[i] = _stored(row[i], out[i])
        finish(counters, 0, end - begin)
    wait(counters, 0, rows)
