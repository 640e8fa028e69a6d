"""Drawings as files of their own: one for light grounds, one for dark ones."""

from __future__ import annotations

from headstart.report.markup import Markup, tag
from headstart.report.style import DARK, DARK_SERIES, LIGHT, LIGHT_SERIES

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
THEMES = {
    "light": {**LIGHT, "ours": LIGHT_SERIES[0], "other": "#8b95a1", "raised": "#f6f7f9",
              "green": "#116329", "red": "#b3261e", "cyan": "#0b6e7f"},
    "dark": {**DARK, "ours": DARK_SERIES[0], "other": "#8b95a1", "raised": "#1c2025",
             "green": "#56d364", "red": "#ff8f85", "cyan": "#4dd0e1"},
}  # fmt: skip


def drawing(width: int, height: int, title: str, described: str, style: str, *parts: str) -> str:
    """A whole SVG file."""
    # Plain ASCII, so that a difference between two versions can be read.
    inner = tag(
        "svg", tag("title", title), tag("desc", described), tag("style", Markup(style)), *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=width,
        height=height, role="img",
    )  # fmt: skip
    return inner.replace("><", ">\n<").encode("ascii", "xmlcharrefreplace").decode() + "\n"


def words(text: str, x: float, y: float, class_: str = "", **attributes: str) -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), class_=class_ or None, **attributes)


def stroke(path: str, class_: str) -> Markup:
    return tag("path", d=path, class_=class_)
