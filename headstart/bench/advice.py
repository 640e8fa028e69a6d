"""What the figures mean for the server's operator: K to use, where to turn it off, what is wrong.

Every sentence rests on a figure of the table; a difference that may be noise is not advised on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from headstart.bench.answers import Equality
from headstart.bench.cells import Cell, Point
from headstart.bench.records import Speculation
from headstart.bench.statistics import NORMAL
from headstart.bench.sweep import Comparison, Crossover
from headstart.bench.variants import Drafts
from headstart.bench.words import stream_words

LOW_ACCEPTANCE = 0.60
_WORTH_IT, _SLOWER_TTFT = 1.01, 1.10
_MOST_FAILURES = 0.01
_FEWEST_DRAFTS = 200  # before a head is judged


def advice(
    cells: Sequence[Cell],
    comparisons: Sequence[Comparison],
    found: Sequence[Crossover],
    drafts: Mapping[str, Drafts | None],
    *,
    is_valid: bool = True,
) -> list[str]:
    """Sentences, the most useful first; `drafts` says how many each variant drafts. Of a run that
    is not valid only what was answered is described: its times are not the server's."""
    if not is_valid:
        return [*_answers(comparisons), *_failures(cells)]
    return [
        *_best(cells, comparisons),
        *_turning_off(found, drafts),
        *_acceptance(cells),
        *_first_tokens(comparisons),
        *_answers(comparisons),
        *_failures(cells),
    ]


def _best(cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> Iterator[str]:
    if not comparisons or any(cell.task for cell in cells):
        return  # tasks are not loads: what to use does not change from one to the next
    base = comparisons[0].base
    points = sorted({cell.point for cell in cells})
    points = [point for point in points if _is_judged(point, comparisons)]
    chosen = [_fastest(point, comparisons) or base for point in points]
    for name, group in groupby(zip(points, chosen, strict=True), key=lambda pair: pair[1]):
        loads = [point for point, _ in group]
        where = loads[0].name if len(loads) == 1 else f"{loads[0].name} to {loads[-1].name}"
        if name == base:
            undecided = list(_undecided(loads, comparisons))
            do = "stay with" if undecided else "use"
            yield f"{where}: {do} {base}; nothing else was faster beyond noise."
            yield from undecided
            continue
        ups = [c.speed_up.value for c in comparisons if c.variant == name and c.point in loads
               and c.speed_up is not None]  # fmt: skip
        gain = f"{ups[0]:.2f}" if len(ups) == 1 else f"{min(ups):.2f} to {max(ups):.2f}"
        yield f"{where}: use {name}, {gain} times as fast as {base}."


def _undecided(loads: Sequence[Point], comparisons: Sequence[Comparison]) -> Iterator[str]:
    """What may well be faster, as far as is known."""
    for c in comparisons:
        up = c.speed_up
        if c.point in loads and up is not None and up.is_noise and up.value > 1:
            yield (
                f"{c.point.name}: not decided, {c.variant} was {up.value:.2f} ({up.low:.2f} to "
                f"{up.high:.2f}) times as fast; more requests or repeats would tell."
            )


def _is_judged(point: Point, comparisons: Sequence[Comparison]) -> bool:
    """Whether every speed-up there has an interval: else `nothing was faster` would be a guess."""
    return all(
        c.is_speed_known and c.speed_up is not None and c.speed_up.is_noise is not None
        for c in comparisons
        if c.point == point
    )


def _fastest(point: Point, comparisons: Sequence[Comparison]) -> str | None:
    """The variant with the largest speed-up among those that are faster beyond noise."""
    surely = [
        (c.speed_up.value, c.variant)
        for c in comparisons
        if c.point == point and c.speed_up and c.speed_up.is_noise is False
        if c.speed_up.value > _WORTH_IT
    ]
    return max(surely)[1] if surely else None


def _turning_off(found: Sequence[Crossover], drafts: Mapping[str, Drafts | None]) -> Iterator[str]:
    for crossover in found:
        if drafts.get(crossover.variant) == "auto":
            continue  # it turns itself off
        name, last, first = crossover.variant, crossover.last_faster, crossover.first_slower
        if last is None:
            yield f"{name} was slower at every concurrency measured: leave it off."
        elif first is not None and not crossover.is_ever_faster:
            yield (
                f"{name} was slower from {stream_words(first)} and nowhere faster beyond noise: "
                "leave it off."
            )
        elif first is not None:
            yield (
                f"{name} stops to pay between {last} and {stream_words(first)} (about "
                f"{crossover.estimate:.0f}): turn drafting off above {last} "
                f"(Headstart: `--speculate-off-above {last}`, or auto)."
            )


def _acceptance(cells: Sequence[Cell]) -> Iterator[str]:
    """One sentence a variant, about its first depth, which is the same cumulative or not."""
    seen: set[str] = set()
    for cell in cells:
        rates = cell.speculation.cumulative if cell.speculation else ()
        if not rates or cell.variant in seen or not _is_surely_low(cell.speculation):
            continue
        seen.add(cell.variant)
        yield (
            f"{cell.variant}: the first draft is accepted {rates[0]:.2f} of the time, under "
            f"{LOW_ACCEPTANCE:.2f}. Check the head with `headstart inspect --probe`; tune it on "
            "the model's own answers (`headstart distill`, `headstart train`)."
        )


def _is_surely_low(found: Speculation | None) -> bool:
    """Enough drafts, and Wilson's 95 % interval of the first depth all below the threshold."""
    if found is None or not found.cumulative:
        return False
    tried = found.drafted_per_depth[0] if found.drafted_per_depth else found.rounds or 0
    if tried < _FEWEST_DRAFTS:
        return False
    rate, square = found.cumulative[0], NORMAL**2 / tried
    reach = math.sqrt(square * (rate * (1 - rate) + square / 4))
    return (rate + square / 2 + reach) / (1 + square) < LOW_ACCEPTANCE


def _first_tokens(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """One sentence a variant, about where it is worst."""
    later: dict[str, list[tuple[float, str, str]]] = {}
    for c in comparisons:
        if not c.is_comparable:
            continue
        if c.ttft and c.ttft.value > _SLOWER_TTFT and c.ttft.is_noise is False:
            later.setdefault(c.variant, []).append((c.ttft.value, c.where, c.base))
    for variant, found in later.items():
        times, where, base = max(found)
        yield (
            f"{variant}: the first token takes up to {times:.2f} times as long as with {base} "
            f"({where}), since the head reads the prompt too."
        )


def _answers(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for c in comparisons:
        if c.answers is None or c.answers.num_equal == c.answers.num_compared:
            continue
        usual = ""
        if c.own_answers is not None and c.own_answers.num_compared:
            usual = f" ({c.base} from itself: {_differing(c.own_answers)})"
        yield (
            f"{c.variant} at {c.where}: {_differing(c.answers)} greedy answers differ from those "
            f"of {c.base}{usual}. In 16 and 8 bit the rows of a batch can tip a near tie; in "
            "float32 this would be a fault of the server."
        )


def _differing(found: Equality) -> str:
    return f"{found.num_compared - found.num_equal} of {found.num_compared}"


def _failures(cells: Sequence[Cell]) -> Iterator[str]:
    for cell in cells:
        failed = cell.measures.num_requests - cell.measures.num_answered
        if failed > _MOST_FAILURES * cell.measures.num_requests:
            kinds = ", ".join(f"{n} {kind}" for kind, n in cell.measures.failures.items())
            yield (
                f"{cell.variant} at {cell.where}: {failed} of {cell.measures.num_requests} "
                f"requests failed ({kinds}): its figures are those of the rest."
            )
