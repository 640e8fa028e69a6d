"""The two charts of the README: speed beside vLLM, and acceptance before and after tuning."""

from __future__ import annotations

from headstart.report.markup import Markup, tag
from pictures.canvas import SANS, THEMES, drawing, stroke, words
from pictures.sources import KINDS, STREAMS, Speeds, Tuning

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 36, WIDTH - 12, 64, 262


def speed_chart(found: Speeds, theme: str) -> str:
    """Bars of tokens/s as multiples of vLLM's, whose line is at 1."""
    most = max(found.ratio(kind, streams) for kind in KINDS for streams in STREAMS)
    highest = 0.5 * (int(most / 0.5) + 1)
    parts = [*_heading("Tokens per second beside vLLM", "by number of streams; vLLM = 1")]
    parts += _grid([0.5 * step for step in range(int(highest / 0.5) + 1)], highest, "")
    group = (RIGHT - LEFT) / len(KINDS)
    bar = (group - 16) / len(STREAMS)
    for place, (kind, name) in enumerate(KINDS.items()):
        left = LEFT + place * group + 8
        for at, streams in enumerate(STREAMS):
            ratio = found.ratio(kind, streams)
            top, middle = _up(ratio, highest), left + (at + 0.5) * bar
            said = (
                f"{name}, {streams} streams: {found.ours[kind, streams]:.0f} beside "
                f"{found.vllm[kind, streams]:.0f} tokens/s"
            )
            parts.append(
                tag("rect", tag("title", said), x=round(middle - bar / 2 + 1.5, 1), y=round(top, 1),
                    width=round(bar - 3, 1), height=round(BOTTOM - top, 1), rx=2, class_="ours")
            )  # fmt: skip
            parts.append(words(f"{ratio:.2f}", middle, top - 4, "middle value"))
            parts.append(words(str(streams), middle, BOTTOM + 15, "middle small"))
        parts.append(words(name, left + 2 * bar, BOTTOM + 34, "middle name"))
    level = _up(1.0, highest)
    parts.append(stroke(f"M{LEFT} {level:.1f}H{RIGHT}", "level"))
    parts.append(words(found.where, WIDTH / 2, HEIGHT - 10, "middle small"))
    said = "; ".join(
        f"{name} " + ", ".join(f"{found.ratio(kind, s):.2f} at {s}" for s in STREAMS)
        for kind, name in KINDS.items()
    )
    return drawing(WIDTH, HEIGHT, "Tokens per second beside vLLM", said, _style(theme), *parts)


def tuning_chart(found: Tuning, theme: str) -> str:
    """Cumulative acceptance by depth, two lines with their values."""
    parts = [*_heading("Drafts accepted, by depth", "before and after tuning the demo's head")]
    highest = 0.8
    parts += _grid([0.2 * step for step in range(5)], highest, " %", 100)
    depths = range(len(found.before))
    across = (RIGHT - LEFT - 56) / (len(depths) - 1)
    xs = [LEFT + 28 + across * depth for depth in depths]
    for values, name, length, class_, key_at in (
        (found.before, "before", found.lengths[0], "other", TOP + 36),
        (found.after, "after", found.lengths[1], "ours", TOP + 14),
    ):
        ys = [_up(value, highest) for value in values]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(stroke(path, f"line {class_}-line"))
        for x, y, value in zip(xs, ys, values, strict=True):
            parts.append(tag("circle", cx=round(x, 1), cy=round(y, 1), r=4, class_=class_))
            # One line's values stand above it, the other's below, unless the axis is there.
            is_below = class_ == "other" and y < BOTTOM - 24
            parts.append(words(f"{value:.0%}", x, y + (16 if is_below else -9), "middle value"))
        parts.append(stroke(f"M{xs[1] + 76:.1f} {key_at - 4}h26", f"line {class_}-line"))
        said = f"{name}: {length:.2f} tokens per round at K = 3"
        parts.append(words(said, xs[1] + 110, key_at, "name"))
    parts += [words(str(d + 1), x, BOTTOM + 15, "middle small") for d, x in enumerate(xs)]
    parts.append(words("depth of the draft", (xs[0] + xs[-1]) / 2, BOTTOM + 34, "middle name"))
    where = f"SmolLM2-135M-Instruct, {found.answers} held-out answers at temperature 0"
    parts.append(words(where, WIDTH / 2, HEIGHT - 10, "middle small"))
    said = "; ".join(
        f"{name} " + ", ".join(f"{value:.1%}" for value in values)
        for name, values in (("before", found.before), ("after", found.after))
    )
    return drawing(WIDTH, HEIGHT, "Drafts accepted, by depth", said, _style(theme), *parts)


def _heading(title: str, below: str) -> list[Markup]:
    return [words(title, 12, 24, "title"), words(below, 12, 42, "small")]


def _grid(ticks: list[float], highest: float, unit: str, factor: int = 1) -> list[Markup]:
    parts = []
    for tick in ticks:
        y = _up(tick, highest)
        parts.append(stroke(f"M{LEFT} {y:.1f}H{RIGHT}", "axis" if tick == 0 else "grid"))
        shown = f"{tick * factor:.0f}{unit}" if factor > 1 else f"{tick:.1f}"
        parts.append(words(shown, LEFT - 5, y + 4, "end small"))
    return parts


def _up(value: float, highest: float) -> float:
    return BOTTOM - value / highest * (BOTTOM - TOP)


def _style(theme: str) -> str:
    c = THEMES[theme]
    return (
        f"text{{font:13px {SANS};fill:{c['text']}}}.title{{font-size:16px;font-weight:650}}"
        f".small{{font-size:11.5px;fill:{c['quiet']}}}.value{{font-size:11px}}"
        f".name{{font-size:12.5px}}.middle{{text-anchor:middle}}.end{{text-anchor:end}}"
        f".grid{{stroke:{c['rule']}}}.axis{{stroke:{c['quiet']}}}"
        f".level{{stroke:{c['text']};stroke-dasharray:5 3}}"
        f".line{{fill:none;stroke-width:2.5;stroke-linejoin:round}}"
        f".ours{{fill:{c['ours']}}}.other{{fill:{c['other']}}}"
        f".ours-line{{stroke:{c['ours']}}}.other-line{{stroke:{c['other']};stroke-dasharray:7 3}}"
    )
