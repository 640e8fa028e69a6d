"""Line charts.

A value that is not finite breaks its line. Long series are drawn by the extremes of each stretch,
which is what the eye would see of them anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headstart.report import svg
from headstart.report.axes import axis, usable
from headstart.report.figure import described, figure, gap_note
from headstart.report.markup import Markup, joined, tag
from headstart.report.tables import shown

Point = tuple[float, float]
_MAX_DRAWN, _MAX_MARKED = 1000, 30


def line_chart(
    title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str
) -> Markup:
    """One line per series, through its points in the order given."""
    points = [point for line in series.values() for point in line]
    there = [point for point in points if _has_place(point)]
    is_whole = all(float(x).is_integer() for x, _ in there)
    frame = svg.Frame(
        axis([y for _, y in there]), axis([x for x, _ in there], whole=is_whole, snap=False)
    )
    note = gap_note(len(points), len(there))
    lines = [_drawn(frame, i, name, series[name]) for i, name in enumerate(series)]
    words = described(f"Lines of {y_label} by {x_label}", series, note)
    drawing = svg.picture(title, words, frame, frame.drawn(y_label, x_label), *lines)
    columns, rows = _rows(series, x_label, y_label)
    return figure(
        title,
        drawing if there else svg.no_data(title, words),
        keys={name: svg.key(i) for i, name in enumerate(series)},
        note=note,
        columns=columns,
        rows=rows,
    )


def _drawn(frame: svg.Frame, index: int, name: str, points: Sequence[Point]) -> Markup:
    """A line with gaps, markers on some of its points, always on one that stands alone."""
    points = thinned(points)
    there = [_has_place(point) for point in points]
    every = max(1, math.ceil(len(points) / _MAX_MARKED))
    path, marks = "", []
    for i, (x, y) in enumerate(points):
        if not there[i]:
            continue
        place = frame.across(x), frame.up(y)
        is_joined = i > 0 and there[i - 1]
        path += f"{'L' if is_joined else 'M'}{place[0]:.1f} {place[1]:.1f}"
        is_alone = not is_joined and not (i + 1 < len(points) and there[i + 1])
        if is_alone or i % every == 0 or i + 1 == len(points):
            marks.append(svg.marker(index, *place, f"{name}: {shown(x)}, {shown(y)}"))
    return tag("g", svg.line(index, path), *marks) if path else joined()


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """The points; of very many, the first, last, lowest, highest and a gap of each stretch."""
    if len(points) <= _MAX_DRAWN:
        return points
    length = math.ceil(4 * len(points) / _MAX_DRAWN)
    kept: set[int] = set()
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        there = [i for i in stretch if _has_place(points[i])]
        gaps = [i for i in stretch if not _has_place(points[i])]
        kept.update((stretch[0], stretch[-1], *gaps[:1]))
        if there:
            kept.add(min(there, key=lambda i: points[i][1]))
            kept.add(max(there, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def _has_place(point: Point) -> bool:
    return usable(point[0]) and usable(point[1])


def _rows(
    series: Mapping[str, Sequence[Point]], x_label: str, y_label: str
) -> tuple[list[str], list[list[object]]]:
    """One row per x; one per point where a series comes back to an x, or an x is no number."""
    by_x = [dict(line) for line in series.values()]
    every = {x for column in by_x for x in column}
    is_unique = all(len(c) == len(line) for c, line in zip(by_x, series.values(), strict=True))
    if is_unique and not any(math.isnan(x) for x in every):
        rows: list[list[object]] = [[x, *(c.get(x) for c in by_x)] for x in sorted(every)]
        return [x_label, *series], rows
    return ["series", x_label, y_label], [[n, x, y] for n, line in series.items() for x, y in line]
