"""The axes of a sweep as people type them: `concurrency=1,2,4 k=0,1,2,3`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.bench.arrivals import LoadOptions
from headstart.bench.cells import Point
from headstart.bench.words import positive_number
from headstart.errors import ConfigError

NAMES = ("concurrency", "rate", "k")
_FORM = "concurrency=1,4,16 k=0,1,3 (or rate=0.5,1,2)"


@dataclass(frozen=True)
class Axes:
    points: tuple[Point, ...] = ()  # none: as the load's options say
    compare: str | None = None


def parse_axes(words: Sequence[str]) -> Axes:
    """One word an axis; k takes what --compare takes."""
    values: dict[str, str] = {}
    for word in (part for whole in words for part in whole.split()):
        name, equals, value = word.partition("=")
        if name not in NAMES or not equals or not value or name in values:
            raise ConfigError(f"--sweep has {word!r}; give each axis once, as in {_FORM}.")
        values[name] = value
    if "concurrency" in values and "rate" in values:
        raise ConfigError("--sweep has concurrency and rate; a loop is closed or open: give one.")
    points = [Point(concurrency=_whole(text)) for text in _split(values.get("concurrency"))]
    points += [Point(rate=_rate(text)) for text in _split(values.get("rate"))]
    if len(set(points)) < len(points):
        raise ConfigError(f"--sweep has a load twice: {' '.join(words)}.")
    return Axes(tuple(points), values.get("k"))


def points_of(axes: Axes, load: LoadOptions) -> tuple[Point, ...]:
    """The loads of a sweep, or the single one of the options."""
    if axes.points and (load.rate or load.concurrency):
        raise ConfigError("--sweep and --concurrency or --rate were given; put it into --sweep.")
    points = axes.points or (Point(load.rate or 0.0, load.num_streams or 0),)
    if load.spacing is not None and not any(point.is_open for point in points):
        raise ConfigError(
            f"--spacing is {load.spacing} without a rate to spread; give --rate, or leave it out."
        )
    return points


def _split(text: str | None) -> list[str]:
    return [] if text is None else [part for part in text.split(",") if part]


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"--sweep has the concurrency {text!r}; give whole numbers from 1.")
    return int(text)


def _rate(text: str) -> float:
    value = positive_number(text)
    if value is None:
        raise ConfigError(f"--sweep has the rate {text!r}; give conversations per second.")
    return value
