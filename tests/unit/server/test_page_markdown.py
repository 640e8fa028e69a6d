"""Marks inside a line of the page's markdown, by Node and without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import headstart.server

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
SCRIPT = """
import { spansOf } from "./markdown.mjs";
import { readFileSync } from "node:fs";
function shown(text, spans, from, to) {
  let out = "";
  for (const span of spans) {
    out += text.slice(from, span.from) + `<${span.name}>`;
    out += shown(text, span.spans, span.begin, span.end) + `</${span.name}>`;
    from = span.to;
  }
  return out + text.slice(from, to);
}
const texts = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => shown(text, spansOf(text), 0, text.length))));
"""
LINES = {
    "a **b** *c* `d*e`": "a <strong>b</strong> <em>c</em> <code>d*e</code>",
    "*a **b** c*": "<em>a <strong>b</strong> c</em>",
    "**a *b***": "<strong>a <em>b</em></strong>",
    "*a **b***": "<em>a <strong>b</strong></em>",
    "***x*** ___y___": "<strong><em>x</em></strong> <strong><em>y</em></strong>",
    "2 * 3 * 4, snake_case_name": "2 * 3 * 4, snake_case_name",
    "x__y__z, __init__": "x__y__z, <strong>init</strong>",
    "__a __ b__": "<strong>a __ b</strong>",
    "_a __b__ c_": "<em>a <strong>b</strong> c</em>",
    "*a `*` b*": "<em>a <code>*</code> b</em>",
    "``a`b`` `": "<code>a`b</code> `",
    "~~x~~ ~y~": "<del>x</del> ~y~",
    "**[x_y](https://e.x/a_b_c)**": "<strong><a>x_y</a></strong>",
    "[x](javascript:y) **a **b ****c****": "[x](javascript:y) **a **b ****c****",
}
# A model that repeats itself may write any of them without end.
ENDLESS = (
    "__a ", "**a ", "*a ", "_a ", "***a ", "`a ``b ", "[", "[a", "~~a ", "*a **b _c __d ~~e ",
    "[](http://", "_**x_ ",
)  # fmt: skip


def shown(folder: Path, texts: list[str]) -> Any:
    source = Path(headstart.server.__file__).parent / "page" / "markdown.js"
    shutil.copy(source, folder / "markdown.mjs")
    (folder / "show.mjs").write_text(SCRIPT)
    assert NODE is not None
    done = subprocess.run(
        [NODE, "show.mjs"], cwd=folder, input=json.dumps(texts), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_marks_are_found_as_people_mean_them(tmp_path: Path) -> None:
    assert dict(zip(LINES, shown(tmp_path, list(LINES)), strict=True)) == LINES


def test_marks_without_end_do_not_stop_the_page(tmp_path: Path) -> None:
    """Looking for every mark's end anew would take minutes for each of them."""
    texts = [mark * 30_000 for mark in ENDLESS]
    assert [len(text) >= 30_000 for text in shown(tmp_path, texts)] == [True] * len(texts)
