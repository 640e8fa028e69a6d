"""Answers as markdown: what is shown, and that nothing of a model's text ever becomes markup."""

from __future__ import annotations

import re
from typing import Any

from support.page_runs import QUESTION, OpenPage, part, scripted

TEXT = """# Title

Some **bold**, *leaning* and `code < 1` text, 2 * 3 * 4, snake_case_name.

```python
def f(x):
    return "<b>" if x else None  # **not bold**
```

- one
- two
  1. inner
  2. more
- three

| a | b |
|---|---|
| 1 | `2` |

> said
> twice

---
A [link](https://example.com/a?b=c), ~~gone~~."""
HOSTILE = """<img src=x onerror=alert(1)> <script>alert(2)</script>
[a](javascript:alert(3)) [b](data:text/html,x) ![c](https://example.com/x.png)
<style>*{display:none}</style> **<b onclick=alert(4)>bold</b>** `<i>`

```html
<iframe src="https://example.com"></iframe></code></pre><script>alert(5)</script>
```

| <u>x</u> | [y](vbscript:z) |
|---|---|
| <form action=/x> | <a href="https://example.com">q</a> |

- <svg onload=alert(6)>
> <math><mtext></mtext></math>
# <h1 id=text>"""


def answer(page: Any, text: str) -> Any:
    """The page has been told this, three characters a token."""
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    origins = ("accepted", "recovered", "bonus")
    scripted(page, *(part({"content": p}, (p, origins[at % 3])) for at, p in enumerate(pieces)))
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.locator(".said.assistant .end").wait_for()
    return page.locator(".said.assistant .text")


def test_markdown_becomes_elements_and_keeps_its_tints(open_page: OpenPage) -> None:
    page = open_page()
    shown = answer(page, TEXT)
    names = ("h3", "strong", "em", "del", "blockquote p", "th", "td", "ol li", "ul > li")
    texts = {name: shown.locator(name).all_inner_texts() for name in names}
    assert texts["h3"] == ["Title"] and texts["strong"] == ["bold"] and texts["em"] == ["leaning"]
    assert texts["del"] == ["gone"] and texts["blockquote p"] == ["said\ntwice"]
    assert texts["th"] == ["a", "b"] and texts["td"] == ["1", "2"]
    assert texts["ol li"] == ["inner", "more"] and len(texts["ul > li"]) == 3
    code = shown.locator("pre code").inner_text()
    assert code == 'def f(x):\n    return "<b>" if x else None  # **not bold**'
    assert shown.locator(".code-head span").inner_text() == "python"
    assert "2 * 3 * 4, snake_case_name." in shown.inner_text()
    link = shown.locator("a")
    assert link.get_attribute("href") == "https://example.com/a?b=c"
    assert "noopener" in (link.get_attribute("rel") or "")
    # Every character is inside a token with its origin, in code as elsewhere.
    assert shown.locator("pre .accepted").count() > 5 and shown.locator("li .bonus").count() > 0


def test_plain_text_is_what_the_model_wrote(open_page: OpenPage) -> None:
    page = open_page()
    shown = answer(page, TEXT)
    page.check("#plain")
    assert shown.evaluate("e => e.textContent") == TEXT
    assert shown.locator("strong, pre, li").count() == 0
    page.uncheck("#plain")
    assert shown.locator("pre").count() == 1


def test_what_a_model_writes_never_becomes_markup(open_page: OpenPage) -> None:
    """The page's console stays quiet (no script ran) and nobody is asked for anything."""
    page = open_page()
    page.on("dialog", lambda dialog: (_ for _ in ()).throw(AssertionError(dialog.message)))
    shown = answer(page, HOSTILE)
    allowed = {
        "DIV", "P", "SPAN", "STRONG", "EM", "DEL", "CODE", "PRE", "BUTTON", "A", "UL", "OL", "LI",
        "BLOCKQUOTE", "TABLE", "TBODY", "TR", "TH", "TD", "HR", "H3", "H4", "H5", "H6",
    }  # fmt: skip
    names = shown.evaluate("e => [...new Set([...e.querySelectorAll('*')].map(c => c.tagName))]")
    assert set(names) <= allowed
    attributes = shown.evaluate(
        "e => [...new Set([...e.querySelectorAll('*')].flatMap(c => c.getAttributeNames()))]"
    )
    assert set(attributes) <= {"class", "title", "href", "rel", "target", "type", "tabindex"}
    links = shown.locator("a").evaluate_all("all => all.map(a => a.href)")
    assert links == ["https://example.com/x.png"], "a picture is a link, other schemes are text"
    text = shown.evaluate("e => e.textContent")
    for word in ("<img src=x", "<script>", "javascript:alert(3)", "<iframe", "<svg on", "<h1 id"):
        assert word in text, word


def test_marks_without_end_are_drawn_and_the_next_question_can_be_sent(
    open_page: OpenPage,
) -> None:
    page = open_page()
    for text in (">" * 6000 + " deep", "- " * 6000 + "deep", "[" * 6000 + " deep"):
        answer(page, text)
        assert "deep" in page.locator(".said.assistant .text").inner_text()
        page.locator("#send").wait_for()
        page.click("#clear")


def test_an_answer_that_breaks_off_anywhere_loses_no_words(open_page: OpenPage) -> None:
    """Half a fence, half a table or half a link is text like any other."""
    page = open_page()
    for end in range(5, len(TEXT), 29):
        words = set(re.findall(r"[a-z]{4,}", TEXT[:end])) - {"https", "example"}
        shown = answer(page, TEXT[:end]).evaluate("e => e.closest('.said').textContent")
        assert all(word in shown for word in words), TEXT[:end]
        page.click("#clear")
