"""A page is one file that needs no other, holds what it was given, and appears whole."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headstart.errors import WriteFailed
from headstart.report.page import Page
from headstart.report.style import ORIGINS

ROOT = Path(__file__).resolve().parents[3]

HOSTILE = '</p><script>alert("1")</script><img src="x" onerror=alert(1)> & \x1b'


class Reader(HTMLParser):
    """Collects what a browser would see: elements with their attributes, text, data blocks."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.text = ""
        self.feed(page.render())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag == "script" and data.strip():
            name = str(attributes.get("id"))
            self.blocks[name] = self.blocks.get(name, "") + data
        else:
            self.text += data


def full_page(text: str = "plain") -> Page:
    """A page with every part, each holding the text."""
    page = Page(text, text)
    page.heading(text)
    page.text(text)
    page.facts({text: text, "n": 3})
    page.table([text, "b"], [[text, 1.5]], note=text)
    page.line_chart(text, {text: [(0, 1.0), (1, 2.0)]}, text, text)
    page.bar_chart(text, [text], {text: [1.0]}, text)
    page.bar_chart(text, [text], {text: [1.0]}, text)
    page.json(text, {text: text})
    return page


def test_hostile_text_stays_text_everywhere() -> None:
    plain, hostile = Reader(full_page()), Reader(full_page(HOSTILE))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in plain.elements]
    assert not any(key.startswith("on") for _, given in hostile.elements for key in given)
    shown = HOSTILE.replace("\x1b", "\ufffd")
    assert hostile.text.count(shown) >= 15
    assert [json.loads(block) for block in hostile.blocks.values()] == [{HOSTILE: HOSTILE}]


def test_a_page_refers_to_nothing_outside_itself() -> None:
    html = full_page().render()
    assert "://" not in html
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)
    for tag, given in Reader(full_page()).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "xlink:href"} & set(given)
        assert tag != "script" or given.get("type") == "application/json"
    assert "default-src 'none'" in html


def test_every_svg_is_well_formed_and_every_id_unique() -> None:
    html = full_page(HOSTILE).render()
    drawings = re.findall(r"<svg\b.*?</svg>", html, re.DOTALL)
    assert len(drawings) == 6  # three charts and a key for each
    for drawing in drawings:
        ET.fromstring(drawing)
    ids = [given["id"] for _, given in Reader(full_page()).elements if "id" in given]
    assert len(ids) == len(set(ids))
    used = re.findall(r"url\(#([^)]+)\)", full_page().render())
    assert used
    assert set(used) <= set(ids)


def test_the_body_is_well_formed() -> None:
    html = full_page(HOSTILE).render()
    body = ET.fromstring(html[html.index("<body>") : html.index("</html>")])
    assert body.tag == "body" and len(list(body.iter("svg"))) == html.count("<svg")


def test_data_is_read_back_as_it_was_given() -> None:
    page = Page("t")
    page.json("run 1", {"loss": [1.5, math.nan, math.inf, -math.inf], "é": "<b>", "none": None})
    block = Reader(page).blocks["data-run-1"]
    found = json.loads(block, parse_constant=pytest.fail)
    assert found == {"loss": [1.5, "NaN", "Infinity", "-Infinity"], "é": "<b>", "none": None}
    assert math.isnan(float(found["loss"][1]))


def test_two_data_blocks_of_one_name_are_refused() -> None:
    page = Page("t")
    page.json("run 1", {})
    with pytest.raises(ValueError, match="data named 'run-1' already"):
        page.json("run-1", {})


def test_the_same_calls_give_the_same_bytes() -> None:
    assert full_page().render() == full_page().render()


def test_writing_replaces_an_older_report_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    full_page("\ud800 half a pair").write(path)
    assert path.read_text(encoding="utf-8") == full_page("\ud800 half a pair").render()
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_older_report_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises((WriteFailed, KeyboardInterrupt)):
        full_page().write(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [("absent/r.html", "No such file"), ("file/r.html", "Not a directory"), ("folder", "")],
    ids=["no-folder", "below-a-file", "is-a-folder"],
)
def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(WriteFailed, match=f"cannot write the report .*{place}: {reason}"):
        Page("t").write(tmp_path / place)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_tinted_text_is_escaped_and_keeps_its_origins() -> None:
    page = Page("t")
    page.figures({"speed <up>": "1.4x"})
    page.tinted([("a <b>", "accepted"), ("\nc", "recovered")])
    text = page.render()
    assert '<span class="origin accepted" title="accepted">a &lt;b&gt;</span>' in text
    assert "speed &lt;up&gt;" in text and "<b>1.4x</b>" in text


def test_origins_look_as_on_the_servers_page() -> None:
    sheet = (ROOT / "headstart/server/page/style.css").read_text()
    for name, (light, dark) in ORIGINS.items():
        assert f"--{name}-tint: light-dark({light}, {dark})" in sheet
