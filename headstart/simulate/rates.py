"""Rates over many answers: walked and row average, with 95 % intervals over prompts.

Answers to one prompt resemble each other, so whole prompts are drawn again, not answers or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.sampling.acceptance import Acceptance
from headstart.simulate.answers import Answer
from headstart.simulate.expected import RULES, Expected
from headstart.simulate.matches import Matches, every_row, walk

Floats = NDArray[np.float64]
Interval = tuple[float, float]
_DRAWS, _SEED, _CHUNK = 1000, 0, 100


@dataclass(frozen=True)
class Size:
    answers: int
    prompts: int
    tokens: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Size:
        prompts = {answer.prompt_id for answer in answers}
        return cls(len(answers), len(prompts), sum(answer.num_tokens for answer in answers))


@dataclass(frozen=True)
class Rates:
    """Replayed acceptance: `walked` by K, from 0; `rows` at the largest K."""

    size: Size
    walked: list[Acceptance]
    walked_intervals: list[Interval] | None  # of the acceptance lengths
    cumulative_intervals: list[Interval] | None  # by depth, at the largest K
    rows: Acceptance
    rows_intervals: list[Interval] | None

    @property
    def lengths(self) -> list[float]:
        """Acceptance length by K, walked."""
        return [acceptance.length for acceptance in self.walked]

    @property
    def row_lengths(self) -> list[float]:
        """Acceptance length by K, as the average over all rows."""
        return [1 + sum(self.rows.per_round[:drafts]) for drafts in range(len(self.walked))]

    def as_json(self) -> dict[str, Any]:
        largest = self.walked[-1]
        return {
            **vars(self.size),
            "walked": {
                "acceptance_length": self.lengths,
                "acceptance_length_interval": self.walked_intervals,
                "cumulative_acceptance": largest.cumulative,
                "cumulative_acceptance_interval": self.cumulative_intervals,
                "conditional_acceptance": largest.conditional,
                "counters": [
                    {"rounds": a.rounds, "drafted": a.drafted, "accepted": a.accepted}
                    for a in self.walked
                ],
            },
            "row_average": {
                "acceptance_length": self.row_lengths,
                "acceptance_length_interval": self.rows_intervals,
                "cumulative_acceptance": self.rows.cumulative,
                "conditional_acceptance": self.rows.conditional,
            },
        }


def rates(found: Sequence[Matches], max_drafts: int) -> Rates:
    """Counters of all answers for every K, added up."""
    every_k = range(max_drafts + 1)
    walked = [[walk(matches, drafts) for drafts in every_k] for matches in found]
    rows = [every_row(matches) for matches in found]
    prompts = [matches.answer.prompt_id for matches in found]

    def lengths(sums: Floats) -> Floats:
        return 1 + sums[:, ::2] / np.maximum(sums[:, 1::2], 1)

    def shares(sums: Floats) -> Floats:
        return sums[:, ::2] / np.maximum(sums[:, 1::2], 1)

    pairs = [[n for a in each for n in (sum(a.accepted), a.rounds)] for each in walked]
    depths = [[n for k in range(max_drafts) for n in _at(each[-1], k)] for each in walked]
    partial = [[n for k in every_k for n in (sum(a.accepted[:k]), a.rounds)] for a in rows]
    return Rates(
        Size.of([matches.answer for matches in found]),
        [_total([each[drafts] for each in walked]) for drafts in every_k],
        intervals(prompts, pairs, lengths),
        intervals(prompts, depths, shares),
        _total(rows),
        intervals(prompts, partial, lengths),
    )


def _at(counters: Acceptance, depth: int) -> tuple[int, int]:
    if depth >= len(counters.drafted):
        return 0, 0
    return counters.accepted[depth], counters.drafted[depth]


def _total(parts: Sequence[Acceptance]) -> Acceptance:
    total = Acceptance()
    for part in parts:
        total.add(part)
    return total


@dataclass(frozen=True)
class FormulaRates:
    """Row averages of one rule, by formula."""

    size: Size
    rule: str
    conditional: list[float]  # by depth
    intervals: list[Interval] | None  # of the acceptance lengths, by K from 0

    @property
    def cumulative(self) -> list[float]:
        return list(accumulate(self.conditional, mul))

    @property
    def lengths(self) -> list[float]:
        """Acceptance length by K."""
        return [1 + sum(self.cumulative[:drafts]) for drafts in range(len(self.conditional) + 1)]

    def as_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.lengths,
            "acceptance_length_interval": self.intervals,
            "cumulative_acceptance": self.cumulative,
            "conditional_acceptance": self.conditional,
        }


def formula_rates(found: Sequence[Expected]) -> dict[str, FormulaRates]:
    """Row averages of every rule."""
    prompts = [expected.answer.prompt_id for expected in found]
    size = Size.of([expected.answer for expected in found])

    def lengths(sums: Floats) -> Floats:
        conditional = sums[:, ::2] / np.maximum(sums[:, 1::2], 1e-300)
        cumulative = np.cumprod(np.clip(conditional, 0, 1), axis=1)
        return 1 + np.concatenate([np.zeros_like(sums[:, :1]), np.cumsum(cumulative, axis=1)], 1)

    result = {}
    for index, rule in enumerate(RULES):
        accepted = np.array([expected.accepted[index].numpy() for expected in found])
        weight = np.array([expected.weight[index].numpy() for expected in found])
        pairs = np.stack([accepted, weight], -1).reshape(len(found), -1)
        total = accepted.sum(0) / np.maximum(weight.sum(0), 1e-300)
        result[rule] = FormulaRates(
            size, rule, total.tolist(), intervals(prompts, pairs.tolist(), lengths)
        )
    return result


def intervals(
    groups: Sequence[Hashable],
    values: Sequence[Sequence[float]],
    statistic: Callable[[Floats], Floats],
) -> list[Interval] | None:
    """95 % bootstrap intervals of a statistic of sums: values [answers, F], groups are drawn again.

    `statistic` maps sums [draws, F] to [draws, S]. None with fewer than two groups.
    """
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        return None
    place = {name: index for index, name in enumerate(names)}
    sums = np.zeros((len(names), len(values[0])))
    np.add.at(sums, [place[group] for group in groups], np.asarray(values, dtype=np.float64))
    random = np.random.default_rng(_SEED)
    shares = np.full(len(names), 1 / len(names))
    draws = [
        statistic(random.multinomial(len(names), shares, size=_CHUNK) @ sums)
        for _ in range(_DRAWS // _CHUNK)
    ]
    low, high = np.quantile(np.concatenate(draws), [0.025, 0.975], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))
