"""The terminal picture: what `headstart demo` wrote to a terminal, drawn from a recording.

A recording holds screens: lines of runs, each [column, text, colour, is_bold]. The question's
screens follow each other, then the summary appears below and stays.
"""

from __future__ import annotations

from typing import Any

from headstart.report.markup import Markup, joined, tag
from pictures.canvas import MONO, THEMES, drawing

COLUMN, ROW, EDGE, BAR = 7.83, 18, 16, 30
_SECONDS_STILL = 6.0  # the whole is shown this long before it begins again


def terminal_picture(recording: Any, theme: str) -> str:
    head, frames, foot = recording["head"], recording["frames"], recording["foot"]
    tallest = max(len(frame["lines"]) for frame in frames)
    num_rows = len(head) + tallest + len(foot)
    width = round(recording["columns"] * COLUMN + 2 * EDGE)
    height = BAR + num_rows * ROW + EDGE
    race_seconds = frames[-1]["seconds"] - frames[0]["seconds"]
    whole = race_seconds + _SECONDS_STILL
    rules, parts = [], [_window(width, height), _lines(head, 0)]
    for at, frame in enumerate(frames):
        begin = frame["seconds"] - frames[0]["seconds"]
        end = frames[at + 1]["seconds"] - frames[0]["seconds"] if at + 1 < len(frames) else whole
        rules.append(_shown_from_to(f"f{at}", begin / whole, end / whole))
        is_last = at + 1 == len(frames)
        parts.append(tag("g", _lines(frame["lines"], len(head)), id=f"f{at}",
                         class_="frame last" if is_last else "frame"))  # fmt: skip
    rules.append(_shown_from_to("foot", race_seconds / whole, 1.0))
    # It begins with the end, so that whoever comes sees everything first.
    timing = f"{whole:.2f}s step-end -{race_seconds:.2f}s infinite"
    below = _lines(foot, len(head) + tallest)
    parts.append(tag("g", below, id="foot", class_="frame last"))
    # Where nothing may move, or styles are not animated, the end is shown.
    style = _style(theme) + (
        ".frame{visibility:hidden}.last{visibility:visible}"
        f"@media (prefers-reduced-motion: no-preference){{.frame{{animation:{timing}}}"
        + "".join(rules) + "}"
    )  # fmt: skip
    title = "headstart demo in a terminal: an answer without and with MTP, side by side"
    return drawing(width, height, title, _text(foot), style, *parts)


def _shown_from_to(name: str, begin: float, end: float) -> str:
    a, b = f"{100 * begin:.2f}%", f"{100 * end:.2f}%"
    steps = f"0%{{visibility:hidden}}{a}{{visibility:visible}}"
    if begin == 0.0:
        steps = "0%{visibility:visible}"
    steps += f"{b}{{visibility:hidden}}" if end < 1.0 else "100%{visibility:visible}"
    return f"@keyframes {name}{{{steps}}}#{name}{{animation-name:{name}}}"


def _window(width: int, height: int) -> Markup:
    dots = [tag("circle", cx=20 + 18 * at, cy=15, r=5, class_="dot") for at in range(3)]
    around = tag("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=8, class_="window")
    return joined(around, *dots)


def _lines(lines: list[Any], first: int) -> Markup:
    parts = []
    for number, runs in enumerate(lines, first):
        y = BAR + (number + 0.75) * ROW
        for column, text, colour, is_bold in runs:
            names = [name for name in (colour, "bold" if is_bold else "") if name]
            parts.append(
                tag("text", text, x=round(EDGE + column * COLUMN, 1), y=round(y, 1),
                    class_=" ".join(names) or None)
            )  # fmt: skip
    return joined(*parts)


def _text(lines: list[Any]) -> str:
    return "\n".join("".join(text for _, text, _, _ in runs) for runs in lines)


def _style(theme: str) -> str:
    c = THEMES[theme]
    return (
        f"text{{font:13px {MONO};white-space:pre;fill:{c['text']}}}"
        f".window{{fill:{c['raised']};stroke:{c['rule']}}}.dot{{fill:{c['rule']}}}"
        f".bold{{font-weight:700}}.green{{fill:{c['green']}}}.red{{fill:{c['red']}}}"
        f".cyan{{fill:{c['cyan']}}}"
    )
