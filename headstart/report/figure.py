"""What every chart comes with: caption, key of its series, a note on gaps, the data as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headstart.report.markup import Markup, tag
from headstart.report.tables import table

_MAX_ROWS = 400  # a longer table is no longer read; machines have the page's data blocks


def figure(
    title: str,
    drawing: Markup,
    *,
    keys: Mapping[str, Markup],
    note: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> Markup:
    """A drawing with what belongs to it; `keys` has the sign of each series."""
    parts = [tag("figcaption", title)]
    if keys:
        parts.append(tag("ul", *(tag("li", sign, name) for name, sign in keys.items())))
    parts.append(tag("div", drawing, class_="wide", tabindex=0))
    if note:
        parts.append(tag("p", note, class_="note"))
    every = max(1, math.ceil(len(rows) / _MAX_ROWS))
    summary = "Data" if every == 1 else f"Data (one row in {every})"
    data = table(columns, rows[::every], f"Data of {title}")
    parts.append(tag("details", tag("summary", summary), data))
    return tag("figure", *parts)


def gap_note(num_values: int, num_usable: int) -> str:
    """How many values have no place in the drawing, if any."""
    missing = num_values - num_usable
    return f"Not finite, so not drawn: {missing} of {num_values} values." if missing else ""


def described(kind: str, series: Mapping[str, object], note: str) -> str:
    """The chart in a sentence, for those who do not see it."""
    return f"{kind}: {', '.join(series) or 'no series'}. {note or 'No gaps.'}"
