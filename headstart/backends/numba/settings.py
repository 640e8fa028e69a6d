"""What rows ask of the compiled chooser, from `Row` objects to arrays that kernels read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from headstart.backends.numba.adjusting import (
    ALLOWED,
    BANNED,
    BIAS,
    DRAFTS,
    ENDS,
    HISTORY,
    LISTS,
    Settings,
)
from headstart.sampling.history import History
from headstart.sampling.params import MASK64, Row, SamplingParams

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("floor", np.float32),  # of values, by min_p
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("held_back", np.int64),  # rows, this one included, for which min_tokens forbids an end
        ("mask", np.int64),  # which one; -1: none
        ("is_adjusted", np.bool_),  # whether anything comes before temperature
    ]
)
_MOST_KEPT = 256  # requests whose lists stay converted

Amounts = tuple[np.ndarray, np.ndarray]  # token ids, and a number with each


class _Lists:
    """Lists of token ids, one behind another; a list that several rows share is there once."""

    def __init__(self, num_rows: int) -> None:
        self.bounds = np.zeros((num_rows, LISTS, 2), np.int64)
        self._parts: list[Amounts] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._length = 0

    def add(self, row: int, number: int, key: int, part: Amounts) -> None:
        place = self._places.get((number, key))
        if place is None:
            place = (self._length, self._length + len(part[0]))
            self._length = place[1]
            self._parts.append(part)
            self._places[number, key] = place
        self.bounds[row, number] = place

    def joined(self) -> Amounts:
        if len(self._parts) == 1:
            return self._parts[0]
        if not self._parts:
            return _amounts(())
        ids, amounts = zip(*self._parts, strict=True)
        return np.concatenate(ids), np.concatenate(amounts)


class SettingsPacker:
    """Keeps the converted lists of the newest requests."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens
        self._known: dict[int, tuple[SamplingParams, dict[int, Amounts]]] = {}

    def pack(self, rows: Sequence[Row], *, penalties: bool = True) -> Settings:
        """The settings of some rows, as `adjust` in `sampling/processors.py` takes them."""
        lists = _Lists(len(rows))
        masks: list[np.ndarray] = []
        records = []
        for number, row in enumerate(rows):
            params, mask = row.params, -1
            own = self._lists_of(params)
            for kind, part in own.items():
                lists.add(number, kind, id(params), part)
            held_back = max(0, params.min_tokens - row.num_output) if row.end_ids else 0
            if held_back:
                lists.add(number, ENDS, id(row.end_ids), _amounts(row.end_ids))
            is_penalised = penalties and params.has_penalties
            if is_penalised:
                _add_history(lists, number, row)
            if row.mask is not None:
                mask = len(masks)
                masks.append(row.mask.numpy())
            is_adjusted = bool(own) or held_back > 0 or is_penalised or mask >= 0
            records.append(_record(row, held_back, mask, is_adjusted=is_adjusted))
        known = np.stack(masks) if masks else np.empty((0, self._num_tokens), np.bool_)
        return Settings(np.array(records, ROW), lists.bounds, *lists.joined(), known)

    def _lists_of(self, params: SamplingParams) -> dict[int, Amounts]:
        """Bias, allowed and banned tokens, where there are any."""
        if not (params.logit_bias or params.allowed_token_ids or params.banned_token_ids):
            return {}
        known = self._known.get(id(params))
        if known is None or known[0] is not params:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            bias = params.logit_bias or {}
            found = {
                BIAS: _amounts(bias, bias.values()),
                ALLOWED: _amounts(params.allowed_token_ids or ()),
                BANNED: _amounts(params.banned_token_ids or ()),
            }
            known = (params, {kind: part for kind, part in found.items() if len(part[0])})
            self._known[id(params)] = known
        return known[1]


def _record(
    row: Row, held_back: int, mask: int, *, is_adjusted: bool
) -> tuple[int | float | bool, ...]:
    """The fields of ROW."""
    p = row.params
    floor = math.log(p.min_p) if p.min_p else -math.inf
    return (
        row.seed & MASK64, row.position, p.temperature, p.top_k, p.top_p, floor,
        p.repetition_penalty, p.presence_penalty, p.frequency_penalty, held_back, mask, is_adjusted,
    )  # fmt: skip


def _add_history(lists: _Lists, number: int, row: Row) -> None:
    history = row.history or History.of(row.prompt_ids, row.output_ids)
    lists.add(number, HISTORY, id(row.history or row), history.counts)
    drafts = row.output_ids[history.num_output :]
    if drafts:
        lists.add(number, DRAFTS, id(row), _amounts(drafts))


def _amounts(ids: Collection[int], numbers: Iterable[float] = ()) -> Amounts:
    return np.array([*ids], np.int32), np.array([*numbers] or [0] * len(ids), np.float32)
