"""Pictures show what results say: drawn again from the same files they are the same bytes."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import make_pictures
from pictures import sources
from pictures.charts import speed_chart, tuning_chart

ROOT = sources.ROOT

MOST_BYTES = 1_500_000


def texts(picture: str) -> list[str]:
    """Everything that is written in a picture, without its description."""
    root = ET.fromstring(picture)
    return [e.text or "" for e in root.iter() if e.tag.endswith("}text")]


def test_every_picture_is_made_of_the_results_that_are_named() -> None:
    assert make_pictures.differences() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_of_speed_has_the_ratio_of_every_cell(theme: str) -> None:
    """Counted from the results' rows, not by what the picture is drawn from."""
    expected = []
    for kind in ("greedy", "temperature", "json", "tools"):
        for load in ("1", "8", "32", "128"):
            rows = [
                row
                for name in sources.SPEED
                for row in sources.result(name)["rows"]
                if (row["kind"], row["load"]) == (kind, load)
            ]
            ours, vllm = (rows[0]["engines"][name] for name in ("ours", "vllm"))
            expected.append(f"{ours['tokens_per_second'] / vllm['tokens_per_second']:.2f}")
    picture = (sources.PICTURES / f"speed-{theme}.svg").read_text()
    assert [t for t in texts(picture) if re.fullmatch(r"\d\.\d\d", t)] == expected


def test_the_chart_of_tuning_has_the_studys_rates_and_lengths() -> None:
    scores = sources.result(sources.STUDY)["scores"]
    said = texts((sources.PICTURES / "acceptance-light.svg").read_text())
    for head, name in (("stock", "before"), ("final", "after")):
        (row,) = (s for s in scores if (s["head"], s["set"]) == (head, sources.ANSWERS))
        found = row["all"]["draft vocabulary"]
        assert all(f"{rate:.0%}" in said for rate in found["cumulative"])
        assert f"{name}: {found['length'][3]:.2f} tokens per round at K = 3" in said


def test_another_number_gives_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [sources.result(name) for name in sources.SPEED]
    before = speed_chart(sources.speeds(documents), "light")
    documents[0]["rows"][0]["engines"]["ours"]["tokens_per_second"] *= 1
    assert speed_chart(sources.speeds(documents), "light") == before
    for row in documents[0]["rows"]:
        row["engines"]["ours"]["tokens_per_second"] *= 1.1
    assert speed_chart(sources.speeds(documents), "light") != before
    study = sources.result(sources.STUDY)
    drawn = tuning_chart(sources.tuning(study), "dark")
    for score in study["scores"]:
        score["all"]["draft vocabulary"]["cumulative"][0] += 0.1
    assert tuning_chart(sources.tuning(study), "dark") != drawn
    # A photograph that was touched is found by its digest.
    other: Any = {**sources.result(sources.PAGE), "pictures": {"page-light.png": "0" * 64}}
    real = make_pictures.result
    monkeypatch.setattr(make_pictures, "result", lambda n: other if n == sources.PAGE else real(n))
    assert any("page-light.png" in line for line in make_pictures.differences())


def test_results_of_different_machines_are_not_mixed() -> None:
    documents = [sources.result(name) for name in sources.SPEED]
    documents[1]["device"] = "another"
    with pytest.raises(ValueError, match="no place in one chart"):
        sources.speeds(documents)


def test_the_terminal_shows_every_row_of_the_recorded_table() -> None:
    recording = sources.result(sources.TERMINAL)
    shown = " ".join(texts((sources.PICTURES / "demo-light.svg").read_text()))
    rows = [" ".join(run[1] for run in line) for line in recording["foot"]]
    assert sum("x" in row for row in rows) >= 5 and all(row in shown for row in rows)
    colours = {run[2] for frame in recording["frames"] for line in frame["lines"] for run in line}
    assert {"green", "red", ""} <= colours, "accepted, recovered and bonus tokens can be seen"


def test_pictures_are_small_and_need_nothing_from_elsewhere() -> None:
    pictures = [path for path in sources.PICTURES.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in pictures) < MOST_BYTES
    for path in pictures:
        if path.suffix == ".svg":
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http" not in text and "<script" not in text and text.isascii(), path.name
    names = {path.name for path in pictures}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    used = {name for page in pages for name in re.findall(r"pictures/([\w.-]+)", page.read_text())}
    assert used == names, "every picture is shown somewhere, and every one that is named exists"
