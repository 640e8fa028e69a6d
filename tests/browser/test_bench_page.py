"""report.html of a benchmark in a real browser: it draws, fits and prints, and loads nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "bench"))

from bench_documents import whole_document

from headstart.bench.page import make_page

CHARTS = ("Output throughput", "Speed-up over K=0", "Cumulative acceptance",
          "Time to first token, 1 stream", "Cost of a million output tokens")  # fmt: skip


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_the_report_looks_right_and_prints(browser: Any, tmp_path: Path, width: int) -> None:
    path, noise = tmp_path / "report.html", []
    make_page(whole_document()).write(path)
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith("file:") else noise.append(r.url))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll inside
    for title in CHARTS:
        drawn = page.locator("figure", has=page.get_by_text(title, exact=True)).locator("svg").last
        box = drawn.bounding_box()
        assert box is not None and box["height"] > 150, title
    # Not one colour: something is drawn on the sheet, in the picture that people would see.
    assert len(page.screenshot(full_page=True)) > 50_000
    page.locator("summary", has_text="benchmark (JSON)").wait_for()
    assert page.pdf().startswith(b"%PDF")
    context.close()
    assert noise == []
