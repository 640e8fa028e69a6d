"""Bar charts: groups of bars from zero, one bar of each group per series.

A value that is not finite has no bar; its label says what it is. Many groups make the chart wider
than the page, which then scrolls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headstart.report import svg
from headstart.report.axes import axis, usable
from headstart.report.figure import described, figure, gap_note
from headstart.report.markup import Markup, joined, tag
from headstart.report.tables import shown

_WIDEST_BAR, _NARROWEST_BAR = 48.0, 10.0
_LONGEST_LABEL = 24


def bar_chart(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    y_label: str,
    *,
    chart_id: str,
) -> Markup:
    """Bars of each group side by side; `chart_id` keeps its fills apart from other charts'."""
    for name, line in series.items():
        if len(line) != len(groups):
            raise ValueError(f"{title!r}: {len(groups)} groups, but {name!r} has {len(line)}")
    values = [value for line in series.values() for value in line]
    num_usable = sum(usable(value) for value in values)
    note = gap_note(len(values), num_usable)
    fills = {name: f"{chart_id}-{i}" for i, name in enumerate(series)}
    hatchings = [svg.hatching(i, fill) for i, fill in enumerate(fills.values())]
    names = [_shortened(group) for group in groups]
    frame, is_turned = _frame(values, names)
    words = described(f"Bars of {y_label} for {len(groups)} groups", series, note)
    drawing = svg.no_data(title, words)
    if num_usable:
        bars = _bars(frame, groups, series, fills)
        labels = _group_labels(frame, names, is_turned)
        parts = [tag("defs", *hatchings), frame.drawn(y_label), *bars, *labels]
        drawing = svg.picture(title, words, frame, *parts)
    return figure(
        title,
        drawing,
        keys={name: svg.key(i, fill) for i, (name, fill) in enumerate(fills.items())},
        note=note,
        columns=["", *series],
        rows=[[group, *(line[g] for line in series.values())] for g, group in enumerate(groups)],
    )


def _frame(values: Sequence[float], names: Sequence[str]) -> tuple[svg.Frame, bool]:
    """A frame wide enough for all bars, and whether the names of groups stand aslant in it."""
    y = axis(values, from_zero=True)
    margins = svg.Frame(y).left + 16.0
    width = max(svg.WIDTH, margins + len(values) * _NARROWEST_BAR * 1.25)
    longest = svg.CHARACTER * max((len(name) for name in names), default=0)
    is_turned = longest > (width - margins) / max(1, len(names)) - 8
    below = 40.0 + longest * 0.6 if is_turned else 30.0
    return svg.Frame(y, width=width, below=below), is_turned


def _bars(
    frame: svg.Frame,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    fills: Mapping[str, str],
) -> Iterator[Markup]:
    each = min(_WIDEST_BAR, _band(frame, groups) * 0.8 / len(series))
    longest = max(len(shown(float(value))) for line in series.values() for value in line)
    is_labelled = longest * svg.CHARACTER * 0.85 <= each
    for g, group in enumerate(groups):
        left = frame.left + (g + 0.5) * _band(frame, groups) - each * len(series) / 2
        for name, line in series.items():
            words = f"{group}, {name}: {shown(float(line[g]))}"
            yield _bar(frame, left, each, float(line[g]), f"url(#{fills[name]})", words)
            if is_labelled or not usable(line[g]):
                yield _value_label(frame, left + each / 2, float(line[g]))
            left += each


def _bar(
    frame: svg.Frame, left: float, width: float, value: float, fill: str, words: str
) -> Markup:
    if not usable(value):
        return joined()
    top, bottom = sorted((frame.up(value), frame.up(0.0)))
    size = {"x": left + 1, "y": top, "width": width - 2, "height": bottom - top}
    return tag("rect", tag("title", words), fill=fill, **size)


def _value_label(frame: svg.Frame, x: float, value: float) -> Markup:
    place = frame.up(value if usable(value) else 0.0)
    y = place + 13 if value < 0 else place - 4
    return tag("text", shown(value), x=x, y=y, class_="middle small")


def _group_labels(frame: svg.Frame, names: Sequence[str], is_turned: bool) -> Iterator[Markup]:
    for g, name in enumerate(names):
        x, y = frame.left + (g + 0.5) * _band(frame, names), frame.bottom + 19
        if is_turned:
            aslant = f"translate({x + 4:.1f} {y - 5:.1f}) rotate(-35)"
            yield tag("text", name, transform=aslant, class_="end")
        else:
            yield tag("text", name, x=x, y=y, class_="middle")


def _band(frame: svg.Frame, groups: Sequence[str]) -> float:
    return (frame.right - frame.left) / len(groups)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 1]}\u2026"
