"""Charts are well-formed, draw what they were given, and say what they could not draw."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from headstart.report.bars import bar_chart
from headstart.report.lines import Point, line_chart, thinned

NAN = math.nan
HOSTILE = '<script>alert("1")</script> & \x00\ud800'


def lines(series: dict[str, list[Point]]) -> ET.Element:
    """The chart parsed as XML: a mistake in any of its elements fails here."""
    return ET.fromstring(line_chart("Loss", series, "step", "loss"))


def bars(groups: list[str], series: dict[str, list[float]]) -> ET.Element:
    return ET.fromstring(bar_chart("Rates", groups, series, "rate", chart_id="c"))


def drawing(figure: ET.Element) -> ET.Element:
    (found,) = [svg for svg in figure.iter("svg") if svg.get("role") == "img"]
    return found


def paths(figure: ET.Element) -> list[str]:
    found = drawing(figure).iter("path")
    return [path.get("d", "") for path in found if "line" in path.get("class", "").split()]


def markers(figure: ET.Element) -> list[str]:
    return [path.findtext("title", "") for path in drawing(figure).iter("path") if len(path)]


def cells(figure: ET.Element) -> list[list[str | None]]:
    return [[cell.text for cell in row] for row in figure.iter("tr")]


def words(figure: ET.Element) -> str:
    return " ".join(figure.itertext())


def test_a_line_goes_through_its_points() -> None:
    (path,) = paths(lines({"a": [(0, 0.0), (5, 1.0), (10, 0.5)]}))
    (x0, y0), (x1, y1), (x2, y2) = [
        tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]
    ]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y0 - y1) == pytest.approx(2 * (y2 - y1), abs=0.2)  # y grows downwards


def test_a_value_that_is_not_finite_is_a_gap_and_is_told() -> None:
    figure = lines({"a": [(0, 1.0), (1, 2.0), (2, NAN), (3, 1.0), (4, math.inf), (5, 2.0)]})
    (path,) = paths(figure)
    assert re.sub("[^ML]", "", path) == "MLMM"
    assert markers(figure) == ["a: 0, 1", "a: 1, 2", "a: 3, 1", "a: 5, 2"]
    assert "Not finite, so not drawn: 2 of 6 values." in words(figure)
    assert ["2", "NaN"] in cells(figure)


def test_without_gaps_nothing_is_said_of_them() -> None:
    assert "not drawn" not in words(lines({"a": [(0, 1.0)]}))


def test_one_point_is_a_marker() -> None:
    figure = lines({"a": [(100, 3.2)]})
    assert markers(figure) == ["a: 100, 3.2"]


@pytest.mark.parametrize(
    "series", [{}, {"a": []}, {"a": [(0, NAN), (NAN, 1.0)]}], ids=["none", "empty", "all-gaps"]
)
def test_a_chart_of_nothing_says_so(series: dict[str, list[Point]]) -> None:
    figure = lines(series)
    assert "no data" in words(figure)
    assert paths(figure) == []


@pytest.mark.parametrize("size", [1e-310, 1e-9, 1e9, 1e299, 1.7e308], ids=str)
def test_values_of_any_size_stay_inside_the_drawing(size: float) -> None:
    figure = lines({"a": [(0, -size), (size, size), (2, 0.0)]})
    width, height = map(float, drawing(figure).get("viewBox", "").split()[2:])
    for point in re.findall(r"[ML]([\d.e+-]+) ([\d.e+-]+)", "".join(paths(figure))):
        assert 0 <= float(point[0]) <= width
        assert 0 <= float(point[1]) <= height


def test_series_are_told_apart_without_colours() -> None:
    figure = lines({f"s{i}": [(0, float(i))] for i in range(30)})
    assert len(drawing(figure).findall("g")) == 30
    looks = set()
    for group in drawing(figure).findall("g"):
        line, mark = group
        looks.add((line.get("stroke-dasharray"), mark.get("d")))
    assert len(looks) == 30


def test_the_data_of_lines_is_one_row_per_x() -> None:
    figure = lines({"a": [(2, 0.5), (1, 0.25)], "b": [(2, 7.0)]})
    assert cells(figure) == [["step", "a", "b"], ["1", "0.25", "\u2013"], ["2", "0.50", "7"]]


def test_a_series_that_comes_back_to_an_x_has_one_row_per_point() -> None:
    figure = lines({"a": [(1, 2.0), (1, 3.0)]})
    assert cells(figure) == [["series", "step", "loss"], ["a", "1", "2"], ["a", "1", "3"]]


def test_long_series_keep_their_extremes_and_gaps() -> None:
    points = [(float(i), math.sin(i)) for i in range(20_000)]
    points[777], points[12_345], points[15_000] = (777.0, 50.0), (12_345.0, -50.0), (15_000.0, NAN)
    kept = thinned(points)
    assert len(kept) < 1300
    assert {points[777], points[12_345], points[0], points[-1]} <= set(kept)
    assert any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    figure = lines({"a": points})
    assert len(cells(figure)) <= 402
    assert "one row in 50" in words(figure)


def heights(figure: ET.Element) -> list[float]:
    found = [rect for rect in drawing(figure).iter("rect") if len(rect)]
    return [float(rect.get("height", "")) for rect in found]


def test_bars_are_as_high_as_their_values_also_below_zero() -> None:
    a, b, c = heights(bars(["x", "y", "z"], {"s": [1.0, 2.0, -1.0]}))
    assert b == pytest.approx(2 * a, abs=0.1)
    assert c == pytest.approx(a, abs=0.1)


def test_a_bar_that_is_not_a_number_is_labelled_and_not_drawn() -> None:
    figure = bars(["x", "y"], {"s": [1.0, NAN]})
    assert len(heights(figure)) == 1
    assert "NaN" in [text.text for text in drawing(figure).iter("text")]


def test_fills_of_bars_are_defined_once_and_told_apart_without_colours() -> None:
    figure = bars(["x"], {f"s{i}": [1.0] for i in range(5)})
    ids = [pattern.get("id") for pattern in figure.iter("pattern")]
    assert len(set(ids)) == len(ids) == 10  # each in the drawing and in the key
    used = {rect.get("fill") for rect in figure.iter("rect")} - {None}
    assert used == {f"url(#{name})" for name in ids}
    kinds = {
        (pattern.get("patternTransform"), tuple(child.tag for child in pattern))
        for pattern in figure.iter("pattern")
    }
    assert len(kinds) == 5


def test_many_or_long_groups_keep_bars_and_labels_readable() -> None:
    many = bars([f"group {i}" for i in range(200)], {"a": [1.0] * 200})
    widths = [float(rect.get("width", "")) for rect in drawing(many).iter("rect") if len(rect)]
    assert min(widths) >= 8
    long = bars(["n" * 80, "short"], {"a": [1.0, 2.0]})
    texts = [text.text or "" for text in drawing(long).iter("text")]
    assert "n" * 23 + "\u2026" in texts
    assert ["n" * 80, "1"] in cells(long)


@pytest.mark.parametrize("groups", [[], ["x"]], ids=["no-groups", "no-series"])
def test_a_bar_chart_of_nothing_says_so(groups: list[str]) -> None:
    assert "no data" in words(bars(groups, {}))


def test_series_and_groups_must_agree() -> None:
    with pytest.raises(ValueError, match="2 groups, but 's' has 1"):
        bars(["x", "y"], {"s": [1.0]})


def test_hostile_names_stay_text() -> None:
    charts = [
        line_chart(HOSTILE, {HOSTILE: [(0, 1.0)]}, HOSTILE, HOSTILE),
        bar_chart(HOSTILE, [HOSTILE], {HOSTILE: [1.0]}, HOSTILE, chart_id="c"),
    ]
    for chart in charts:
        assert "<script" not in chart
        assert not list(ET.fromstring(chart).iter("script"))
        assert '<script>alert("1")</script>' in words(ET.fromstring(chart))


def test_a_chart_has_words_for_those_who_do_not_see_it() -> None:
    svg = drawing(lines({"depth 1": [(0, 1.0)], "depth 2": [(0, NAN)]}))
    assert svg.get("aria-label") == "Loss"
    assert (svg[0].tag, svg[0].text) == ("title", "Loss")
    assert svg.findtext("desc") == (
        "Lines of loss by step: depth 1, depth 2. Not finite, so not drawn: 1 of 2 values."
    )
