"""Tables, and how values are written in them.

Numbers of a column share their decimals, so that they can be compared at a glance. Integers are
grouped by thousands: give a `str` where the digits are a name (a seed, an id).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headstart.report.markup import Markup, tag

_DIGITS = 4  # significant ones
_ABSENT = "\u2013"


def shown(value: object) -> str:
    """A value as text: what a reader, not a parser, wants to see."""
    if value is None:
        return _ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _number(value, _decimals(value))
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value) or _ABSENT
    return str(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], name: str) -> Markup:
    """A table that scrolls by itself where it is too long or too wide; `name` is for ears."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"table {name!r}: {len(columns)} columns, but a row of {len(row)}")
    cells = [_column([row[i] for row in rows]) for i in range(len(columns))]
    heads = [
        tag("th", column, scope="col", class_="number" if is_number else None)
        for column, (_, is_number) in zip(columns, cells, strict=True)
    ]
    body = [
        tag(
            "tr",
            *(
                tag(
                    "td" if i else "th",
                    texts[row],
                    scope=None if i else "row",
                    class_="number" if is_number else None,
                )
                for i, (texts, is_number) in enumerate(cells)
            ),
        )
        for row in range(len(rows))
    ]
    inner = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body))
    return tag("div", inner, class_="scroll", role="region", aria_label=name, tabindex=0)


def _column(values: Sequence[object]) -> tuple[list[str], bool]:
    """The texts of one column, and whether it is one of numbers."""
    floats = [value for value in values if isinstance(value, float)]
    sizes = [abs(value) for value in floats if value and math.isfinite(value)]
    is_number = any(_is_number(v) for v in values) and all(
        v is None or _is_number(v) for v in values
    )
    # Shared decimals over a wide range would be a row of zeros for most values.
    if not sizes or max(sizes) / min(sizes) > 10**_DIGITS:
        return [shown(value) for value in values], is_number
    # All digits of the largest value, and enough of the smallest to be more than zeros.
    enough = max(_places(max(sizes), _DIGITS), _places(min(sizes), 2))
    decimals = min(enough, max(_decimals(value) for value in floats))
    texts = [_number(v, decimals) if isinstance(v, float) else shown(v) for v in values]
    return texts, is_number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimals(value: float) -> int:
    """Decimals that are needed for the significant digits of a value, without closing zeros."""
    if not math.isfinite(value) or value == 0.0 or not _is_plain(value):
        return 0
    digits = f"{value:.{_places(value, _DIGITS)}f}"
    return len(digits.rstrip("0").partition(".")[2])


def _places(value: float, num_digits: int) -> int:
    """Places behind the point for so many significant digits."""
    return max(0, num_digits - 1 - math.floor(math.log10(abs(value))))


def _is_plain(value: float) -> bool:
    return 1e-5 <= abs(value) < 1e9


def _number(value: float, decimals: int) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "\u221e" if value > 0 else "-\u221e"
    if value == 0.0:
        value = 0.0  # a negative zero has no reader
    if value and not _is_plain(value):
        return f"{value:.{_DIGITS}g}"
    return f"{value:,.{decimals}f}"
