"""The writer of HTML reports: parts in the order they are added, one file that needs no other.

    page = Page("Tuning run", "GLM-4.5-Air, 2 epochs")
    page.facts({"records": 1200, "learning rate": 5e-5})
    page.line_chart("Loss", {"depth 1": [(0, 2.1), (100, 1.4)]}, "step", "loss")
    page.json("run", {"steps": 100})
    page.write("report.html")

The same calls give the same bytes: dates and versions are up to the caller.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.errors import WriteFailed
from headstart.files import write_whole
from headstart.report.bars import bar_chart
from headstart.report.lines import line_chart
from headstart.report.markup import Markup, joined, tag
from headstart.report.style import stylesheet
from headstart.report.tables import shown, table

# The page may load and run nothing, whatever text found its way into it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Page:
    """A report in the making."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._parts: list[Markup] = [tag("h1", title)]
        if subtitle:
            self._parts.append(tag("p", subtitle, class_="subtitle"))
        self._names: set[str] = set()  # of data blocks, as ids

    def text(self, paragraph: str) -> None:
        self._parts.append(tag("p", paragraph))

    def heading(self, text: str) -> None:
        self._parts.append(tag("h2", text))

    def facts(self, facts: Mapping[str, object]) -> None:
        """Names with their values, one per line; give a str where digits are not to be grouped."""
        pairs = [joined(tag("dt", name), tag("dd", shown(facts[name]))) for name in facts]
        self._parts.append(tag("dl", *pairs))

    def figures(self, figures: Mapping[str, str]) -> None:
        """A few numbers that say it all, large, each with its name."""
        items = [tag("li", tag("b", value), tag("span", name)) for name, value in figures.items()]
        self._parts.append(tag("ul", *items, class_="figures"))

    def tinted(self, pieces: Iterable[tuple[str, str]]) -> None:
        """Text in pieces, each with the origin of its token."""
        spans = [tag("span", text, class_=f"origin {origin}", title=origin)
                 for text, origin in pieces]  # fmt: skip
        self._parts.append(tag("p", *spans, class_="tinted"))

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], note: str = ""
    ) -> None:
        """Rows of text and numbers; ValueError if one has another length than `columns`."""
        self._parts.append(table(columns, rows, note or ", ".join(columns)))
        if note:
            self._parts.append(tag("p", note, class_="note"))

    def line_chart(
        self,
        title: str,
        series: Mapping[str, Sequence[tuple[float, float]]],
        x_label: str,
        y_label: str,
    ) -> None:
        """Lines through (x, y) points; a value that is not finite is a gap."""
        self._parts.append(line_chart(title, series, x_label, y_label))

    def bar_chart(
        self, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], y_label: str
    ) -> None:
        """Bars of each series for each group; ValueError if a series has another length."""
        chart_id = f"chart-{len(self._parts)}"
        self._parts.append(bar_chart(title, groups, series, y_label, chart_id=chart_id))

    def json(self, name: str, document: object) -> None:
        """Data for machines, in `<script type="application/json" id="data-NAME">`, and for eyes.

        JSON has no NaN and no infinities: they become the strings that Python's float() reads.
        """
        block_id = "data-" + re.sub(r"\W+", "-", name)
        if block_id in self._names:
            raise ValueError(f"the report has data named {name!r} already; give each its own name")
        self._names.add(block_id)
        plain = _without_non_finite(document)
        # Inside a script element HTML reads no escapes of its own, but JSON has some.
        packed = json.dumps(plain, allow_nan=False, separators=(",", ":"))
        packed = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", packed)
        self._parts.append(tag("script", Markup(packed), type="application/json", id=block_id))
        laid_out = json.dumps(plain, allow_nan=False, indent=2, ensure_ascii=False)
        summary = tag("summary", f"{name} (JSON)")
        self._parts.append(tag("details", summary, tag("pre", laid_out, tabindex=0)))

    def render(self) -> str:
        """The whole document."""
        body = tag("body", tag("main", Markup("\n".join(self._parts))))
        head = joined(
            Markup('<meta charset="utf-8">\n'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
            tag("title", self._title),
            tag("style", Markup(stylesheet())),
        )
        return f'<!doctype html>\n<html lang="en">\n{tag("head", head)}\n{body}\n</html>\n'

    def write(self, path: str | Path) -> None:
        """Write the file whole, over an older one; on any failure that one stays as it was."""
        path = Path(path)
        try:
            write_whole(path, self.render().encode())
        except OSError as error:
            raise WriteFailed(
                f"cannot write the report {path}: {error.strerror or error}. Nothing was kept. "
                "Give a path in a folder that exists, may be written to and has space left."
            ) from error


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
