"""What rows ask of the compiled chooser, from `Row` objects to arrays that kernels read."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.backends.numba.adjusting import (
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
        ("allowed", np.int64),  # which of the masks; -1: none
        ("mask", np.int64),  # the same, of the grammar
        ("is_penalised", np.bool_),
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


class _Masks:
    """Masks over all tokens; one that several rows share is there once."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._places: dict[int, int] = {}

    def add(self, mask: np.ndarray | None) -> int:
        """Its number; -1 where there is none."""
        if mask is None:
            return -1
        if id(mask) not in self._places:
            self._places[id(mask)] = len(self._parts)
            self._parts.append(mask)
        return self._places[id(mask)]

    def joined(self, num_tokens: int) -> np.ndarray:
        if len(self._parts) == 1:
            return self._parts[0][None]
        return np.stack(self._parts) if self._parts else np.empty((0, num_tokens), np.bool_)


@dataclass(frozen=True)
class _Converted:
    """What a request asks for at every row: bias, banned and allowed tokens, and numbers of ROW
    from temperature to frequency."""

    params: SamplingParams
    lists: dict[int, Amounts]
    allowed: np.ndarray | None
    numbers: tuple[float, ...]
    has_penalties: bool


class SettingsPacker:
    """Keeps what it has converted for the newest requests."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens
        self._known: dict[int, _Converted] = {}

    def pack(self, rows: Sequence[Row], *, penalties: bool = True) -> Settings:
        """The settings of some rows, as `adjust` in `sampling/processors.py` takes them."""
        lists, masks = _Lists(len(rows)), _Masks()
        records = []
        for number, row in enumerate(rows):
            p = row.params
            own = self._converted(p)
            for kind, part in own.lists.items():
                lists.add(number, kind, id(p), part)
            held_back = max(0, p.min_tokens - row.num_output) if row.end_ids else 0
            if held_back:
                lists.add(number, ENDS, id(row.end_ids), _amounts(row.end_ids))
            is_penalised = penalties and own.has_penalties
            if is_penalised:
                _add_history(lists, number, row)
            allowed = masks.add(own.allowed)
            mask = masks.add(None if row.mask is None else row.mask.numpy())
            is_adjusted = bool(own.lists or held_back or is_penalised) or max(allowed, mask) >= 0
            records.append(
                (
                    row.seed & MASK64, row.position, *own.numbers, held_back, allowed, mask,
                    is_penalised, is_adjusted,
                )
            )  # fmt: skip
        known = masks.joined(self._num_tokens)
        return Settings(np.array(records, ROW), lists.bounds, *lists.joined(), known)

    def _converted(self, params: SamplingParams) -> _Converted:
        known = self._known.get(id(params))
        if known is None or known.params is not params:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            known = self._known[id(params)] = self._convert(params)
        return known

    def _convert(self, params: SamplingParams) -> _Converted:
        numbers = (
            params.temperature, params.top_k if params.top_k < self._num_tokens else 0,
            params.top_p, math.log(params.min_p) if params.min_p else -math.inf,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        if not params.is_restricted:
            return _Converted(params, {}, None, numbers, params.has_penalties)
        asked, allowed = params.restrictions, None
        found = {
            BIAS: (asked.biased, asked.amounts),
            BANNED: (asked.banned, np.zeros(len(asked.banned), np.float32)),
        }
        if asked.allowed is not None:
            allowed = np.zeros(self._num_tokens, np.bool_)
            allowed[asked.allowed] = True
        lists = {kind: part for kind, part in found.items() if len(part[0])}
        return _Converted(params, lists, allowed, numbers, params.has_penalties)


def _add_history(lists: _Lists, number: int, row: Row) -> None:
    history = row.history or History.of(row.prompt_ids, row.output_ids)
    lists.add(number, HISTORY, id(row.history or row), history.counts)
    drafts = row.output_ids[history.num_output :]
    if drafts:
        lists.add(number, DRAFTS, id(row), _amounts(drafts))


def _amounts(ids: Collection[int]) -> Amounts:
    return np.array([*ids], np.int32), np.zeros(len(ids), np.float32)
