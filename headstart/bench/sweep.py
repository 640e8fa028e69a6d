"""The cells of a sweep held against those without MTP: speed-ups, crossovers, what to do.

`speed_up` is output tokens per second over the base's in closed loops. In an open loop the load
decides the throughput, so there it is the base's mean TPOT over the variant's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.bench.answers import Equality, compare_answers, compare_repeats
from headstart.bench.cells import Cell, Point
from headstart.bench.cost import Prices, saving
from headstart.bench.statistics import Ratio, ratio

MOST_CACHED_APART = 0.05  # share of prompt tokens that one side may have had cached, not the other


@dataclass(frozen=True)
class Comparison:
    """One cell against the base's cell under the same load. Ratios are variant over base."""

    variant: str
    base: str
    point: Point
    task: str | None
    speed_up: Ratio | None
    output_tokens_per_second: Ratio | None
    tpot: Ratio | None
    ttft: Ratio | None
    savings: dict[str, float | None]  # share of the cost per output token, by price
    answers: Equality | None  # None: not greedy, so nothing to hold against each other
    own_answers: Equality | None  # of the base's first repeat against its others: what is usual
    cached_shares: tuple[float, float] = (0.0, 0.0)  # of prompt tokens: the base's, the variant's

    @property
    def where(self) -> str:
        return self.task or self.point.name

    @property
    def is_comparable(self) -> bool:
        """False where a prefix cache held one side's prompts: the second variant would win."""
        return is_comparable(*self.cached_shares)

    @property
    def is_speed_known(self) -> bool:
        """TPOT, which an open loop is judged by, begins after the prompt was read."""
        return self.is_comparable or self.point.is_open

    @property
    def speed_up_of(self) -> str:
        return "tpot_seconds" if self.point.is_open else "output_tokens_per_second"

    def as_json(self) -> dict[str, Any]:
        ratios = {
            name: None if (found := getattr(self, name)) is None else found.as_json()
            for name in ("speed_up", "output_tokens_per_second", "tpot", "ttft")
        }
        return {
            "variant": self.variant, "base": self.base, "task": self.task, **self.point.as_json(),
            "speed_up_of": self.speed_up_of, **ratios, "savings": self.savings,
            "cached_shares": list(self.cached_shares), "comparable": self.is_comparable,
            "answers": None if self.answers is None else self.answers.as_json(),
            "base_with_itself": None if self.own_answers is None else self.own_answers.as_json(),
        }  # fmt: skip


def is_comparable(one: float, other: float) -> bool:
    """Whether prompts were cached about as often on both sides."""
    return abs(one - other) <= MOST_CACHED_APART


def compare_cells(
    cells: Sequence[Cell], base: str, *, prices: Prices | None, is_greedy: bool
) -> list[Comparison]:
    """Every cell that is not the base's with the base's cell of its load."""
    bases = {cell.point: cell for cell in cells if cell.variant == base}
    return [
        _compared(bases[cell.point], cell, prices, is_greedy)
        for cell in cells
        if cell.variant != base and cell.point in bases
    ]


def _compared(base: Cell, cell: Cell, prices: Prices | None, is_greedy: bool) -> Comparison:
    before = base.measures.output_tokens_per_second
    after = cell.measures.output_tokens_per_second
    direct = after / before if before > 0 else None
    throughput = ratio(base.samples("tokens"), cell.samples("tokens"), value=direct)
    base_tpot, tpot = base.samples("tpot"), cell.samples("tpot")
    return Comparison(
        variant=cell.variant,
        base=base.variant,
        point=cell.point,
        task=cell.task,
        speed_up=ratio(tpot, base_tpot) if cell.point.is_open else throughput,
        output_tokens_per_second=throughput,
        tpot=ratio(base_tpot, tpot),
        ttft=ratio(base.samples("ttft"), cell.samples("ttft")),
        savings=_savings(before, after, prices),
        answers=compare_answers(base.runs, cell.runs) if is_greedy else None,
        own_answers=compare_repeats(base.runs) if is_greedy and len(base.runs) > 1 else None,
        cached_shares=(base.cached_share, cell.cached_share),
    )


def _savings(before: float, after: float, prices: Prices | None) -> dict[str, float | None]:
    if prices is None:
        return {}
    old, new = prices.per_million_tokens(before), prices.per_million_tokens(after)
    return {kind: saving(old[kind], new[kind]) for kind in old}


@dataclass(frozen=True)
class Crossover:
    """Where a variant stops to pay, among the loads that were measured."""

    variant: str
    last_faster: int | None  # streams, noise in its favour; None: not even at the fewest
    first_slower: int | None  # beyond noise; None: not up to the most
    estimate: float | None  # between both, where the speed-up is 1 on a straight line
    is_ever_faster: bool  # beyond noise, at one load or more

    def as_json(self) -> dict[str, Any]:
        return vars(self).copy()


def crossovers(comparisons: Sequence[Comparison]) -> list[Crossover]:
    """For each variant with two closed loops or more whose speed-up has an interval."""
    found = []
    for variant in dict.fromkeys(c.variant for c in comparisons):
        line = [
            (c.point.concurrency, c.speed_up)
            for c in comparisons
            if c.variant == variant and not c.point.is_open and c.is_speed_known
            if c.speed_up is not None and c.speed_up.is_noise is not None
        ]
        if len(line) > 1:
            found.append(_crossover(variant, sorted(line, key=lambda pair: pair[0])))
    return found


def _crossover(variant: str, line: list[tuple[int, Ratio]]) -> Crossover:
    """Behind the last load where it was not surely slower: a dip in the middle is no crossover."""
    others = [i for i, (_, ratio) in enumerate(line) if ratio.value >= 1 or ratio.is_noise]
    is_ever_faster = any(ratio.value > 1 and not ratio.is_noise for _, ratio in line)
    if not others:
        return Crossover(variant, None, line[0][0], None, is_ever_faster)
    last = others[-1]
    if last + 1 == len(line):
        return Crossover(variant, line[last][0], None, None, is_ever_faster)
    (few, above), (many, below) = line[last], line[last + 1]
    share = max(0.0, above.value - 1) / (max(1.0, above.value) - below.value)
    estimate = math.exp(math.log(few) + share * (math.log(many) - math.log(few)))
    return Crossover(variant, few, many, estimate, is_ever_faster)
