"""report.html of a benchmark in a real browser: it draws, fits and prints, and loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench_documents import whole_document

from headstart.bench.page import make_page

CHARTS = ("Output throughput", "Speed-up over K=0", "Cumulative acceptance",
          "Time to first token, 1 stream", "Cost of a million output tokens")  # fmt: skip
PRINTED_WIDTH = 718  # CSS pixels of A4 between its margins
# What is drawn for each value: its title, and how far it reaches above the chart's zero line.
MARKS = """svg => {
    const zero = svg.querySelector('path.axis').getBoundingClientRect().y
    const around = svg.getBoundingClientRect()
    return [...svg.querySelectorAll('rect, path')].filter(m => m.querySelector('title')).map(m => {
        const box = m.getBoundingClientRect()
        const isInside = box.x >= around.x && box.y >= around.y && box.width > 1
            && box.right <= around.right + 1 && box.bottom <= around.bottom + 1
        const top = m.tagName == 'rect' ? box.y : box.y + box.height / 2
        return [m.querySelector('title').textContent, zero - top, isInside]
    })
}"""
HIDE = "svg => svg.querySelectorAll('rect, g path').forEach(m => m.style.visibility = 'hidden')"


@pytest.fixture(params=[1280, 390], ids=["desk", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> Iterator[Any]:
    """The report at a width; its console stays quiet, and it asks nobody for anything."""
    noise: list[str] = []
    make_page(whole_document()).write(tmp_path / "report.html")
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    page = context.new_page()
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith("file:") else noise.append(r.url))
    page.goto((tmp_path / "report.html").as_uri())
    yield page
    context.close()
    assert noise == []


def chart(page: Any, title: str) -> Any:
    return page.locator("figure", has=page.get_by_text(title, exact=True)).locator("svg.chart")


def heights(page: Any, title: str) -> dict[str, float]:
    """By what a mark says before its value; all of them lie within their chart."""
    marks = chart(page, title).evaluate(MARKS)
    assert marks and all(is_inside for _, _, is_inside in marks), title
    return {re.split(r"[:,] (?=\S+$)", words)[0]: height for words, height, _ in marks}


def test_marks_are_as_high_as_their_values(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    cells = whole_document()["cells"]
    speeds = {f"{c['variant']}: {c['concurrency']}": c["measures"]["output_tokens_per_second"]
              for c in cells}  # fmt: skip
    costs = {(c["concurrency"], c["variant"]): c["cost"]["per_million_output_tokens"]["on-demand"]
             for c in cells}  # fmt: skip
    words = {1: "1 stream", 4: "4 streams", 16: "16 streams"}
    by_title = {
        "Output throughput": speeds,
        "Cost of a million output tokens": {f"{words[n]}, {v}": x for (n, v), x in costs.items()},
        "Cumulative acceptance": {"K=3: 1": 0.7, "K=3: 2": 0.5, "K=3: 3": 0.3},
    }
    for title, values in by_title.items():
        drawn = heights(page, title)
        assert drawn.keys() == values.keys(), title
        # The axis of rates begins at the lowest of them, the others at 0.
        zero = min(values.values()) if title == "Cumulative acceptance" else 0.0
        scale = max(drawn.values()) / (max(values.values()) - zero)
        expected = {name: scale * (value - zero) for name, value in values.items()}
        assert drawn == pytest.approx(expected, abs=1.5), title


def test_every_chart_can_be_seen(page: Any) -> None:
    """Not a sheet of one colour: without its marks the picture is another one."""
    for title in CHARTS:
        drawn = chart(page, title)
        box = drawn.bounding_box()
        assert box is not None and box["height"] > 150, title
        seen = drawn.screenshot()
        assert seen == drawn.screenshot(), title  # the control: it does not change by itself
        drawn.evaluate(HIDE)
        assert seen != drawn.screenshot(), title


def test_it_prints_whole_on_paper(page: Any) -> None:
    page.locator("summary", has_text="benchmark (JSON)").wait_for()
    page.emulate_media(media="print")
    page.set_viewport_size({"width": PRINTED_WIDTH, "height": 1000})
    cut = "[...document.querySelectorAll('.wide, .scroll')].filter(e => e.offsetParent"
    assert page.evaluate(f"{cut} && e.scrollWidth > e.clientWidth + 1).length") == 0
    pdf = page.pdf(format="A4")
    num_pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert 2 <= num_pages <= 20, num_pages
