"""What charts are drawn with: the frame with its axes, and the look of each series.

A series is told by its colour and by a second sign (dashes, marker, hatching), for eyes and
printers that see no colours. Colours are classes (`series-0`), so that the page's light and dark
scheme can set them. Lengths are in units of the view box, which are pixels at full width.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.report.axes import Axis, axis
from headstart.report.markup import Markup, joined, tag

NUM_COLOURS = 6
CHARACTER = 7.0  # width of one at the size of labels; digits are about this wide
WIDTH = 720.0
_SHRINKS = 120.0  # on small screens by this much; then the reader scrolls
# Their numbers share no divisor with the colours: no two of the first 30 series look the same.
_DASHES = ("none", "7 3", "2 3", "10 3 2 3", "14 4")
_MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3 -3H3V3H-3z",
    "M0 -4L4 3H-4z",
    "M0 -4.5L4.5 0L0 4.5L-4.5 0z",
    "M0 4L4 -3H-4z",
    "M-4 -1.3H-1.3V-4H1.3V-1.3H4V1.3H1.3V4H-1.3V1.3H-4z",
    "M-1.5 -5H1.5V5H-1.5z",
)
_HATCHES = (None, "rotate(45)", "rotate(-45)", "rotate(90)", "rotate(0)")


def colour(index: int) -> str:
    """The class that gives a series its colour."""
    return f"series-{index % NUM_COLOURS}"


@dataclass(frozen=True)
class Frame:
    """The rectangle that values are drawn in, and the axes on its sides."""

    y: Axis
    x: Axis | None = None  # None: places along it are not numbers
    width: float = WIDTH
    below: float = 48.0  # room for what stands under the rectangle
    top: float = 16.0
    bottom: float = 256.0

    @property
    def left(self) -> float:
        return 34.0 + CHARACTER * max(len(label) for label in self.y.labels)

    @property
    def right(self) -> float:
        return self.width - 16.0

    def across(self, value: float) -> float:
        assert self.x is not None
        return self.left + self.x.share(value) * (self.right - self.left)

    def up(self, value: float) -> float:
        return self.bottom - self.y.share(value) * (self.bottom - self.top)

    def drawn(self, y_label: str, x_label: str = "") -> Markup:
        """Grid, ticks and labels."""
        parts = []
        for tick, label in zip(self.y.ticks, self.y.labels, strict=True):
            height = self.up(tick)
            path = f"M{self.left:.1f} {height:.1f}H{self.right:.1f}"
            parts.append(tag("path", d=path, class_="axis" if tick == 0 else "grid"))
            parts.append(tag("text", label, x=self.left - 6, y=height + 4, class_="end"))
        if self.x is not None:
            for tick, label in zip(self.x.ticks, self.x.labels, strict=True):
                place = self.across(tick)
                path = f"M{place:.1f} {self.bottom:.1f}v5"
                parts.append(tag("path", d=path, class_="axis"))
                parts.append(tag("text", label, x=place, y=self.bottom + 19, class_="middle"))
        path = f"M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}"
        parts.append(tag("path", d=path, class_="axis"))
        middle = (self.top + self.bottom) / 2
        turned = f"translate(13 {middle:.1f}) rotate(-90)"
        parts.append(tag("text", y_label, transform=turned, class_="middle name"))
        centre = (self.left + self.right) / 2
        parts.append(tag("text", x_label, x=centre, y=self.bottom + 40, class_="middle name"))
        return joined(*parts)


def picture(title: str, description: str, frame: Frame, *parts: str) -> Markup:
    """The whole drawing, with words for those who do not see it."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *parts,
        role="img",
        aria_label=title,
        viewBox=f"0 0 {frame.width:.0f} {frame.bottom + frame.below:.0f}",
        style=f"min-width:{frame.width - _SHRINKS:.0f}px",
        class_="chart",
    )


def no_data(title: str, description: str) -> Markup:
    """The drawing of a chart that has nothing to draw."""
    frame = Frame(axis([]), bottom=72.0, below=16.0)
    box = {"x": 1.0, "y": 1.0, "width": WIDTH - 2, "height": 86.0, "rx": 6.0}
    words = tag("text", "no data", x=WIDTH / 2, y=48.0, class_="middle name")
    return picture(title, description, frame, tag("rect", class_="grid", **box), words)


def line(index: int, path: str) -> Markup:
    return tag("path", d=path, class_=f"{colour(index)} line", stroke_dasharray=_dashes(index))


def marker(index: int, x: float, y: float, words: str = "") -> Markup:
    """A point; `words` appear where the pointer rests on it."""
    title = tag("title", words) if words else ""
    shape, place = _MARKERS[index % len(_MARKERS)], f"translate({x:.1f} {y:.1f})"
    return tag("path", title, d=shape, transform=place, class_=_filled(index))


def hatching(index: int, name: str) -> Markup:
    """The fill of a series of bars, to be used as `url(#name)`."""
    turn = _HATCHES[index % len(_HATCHES)]
    ground = tag("rect", width=8, height=8, class_=_filled(index))
    if turn is None:
        strokes = joined()
    elif turn == "rotate(0)":
        strokes = tag("circle", cx=4, cy=4, r=1.8, class_="dot")
    else:
        strokes = tag("path", d="M0 4H8", class_="hatch")
    return tag(
        "pattern",
        ground,
        strokes,
        id=name,
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
        patternTransform=turn,
    )


def key(index: int, fill: str | None = None) -> Markup:
    """The sign of a series beside its name: a piece of its line, or of its bars."""
    if fill is None:
        parts = [line(index, "M1 7H33"), marker(index, 17, 7)]
    else:
        pattern = tag("defs", hatching(index, f"{fill}-key"))
        parts = [pattern, tag("rect", x=9, y=0, width=16, height=14, fill=f"url(#{fill}-key)")]
    return tag("svg", *parts, viewBox="0 0 34 14", class_="key", aria_hidden="true")


def _filled(index: int) -> str:
    return f"{colour(index)} filled"


def _dashes(index: int) -> str:
    return _DASHES[index % len(_DASHES)]
