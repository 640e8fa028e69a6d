"""Elements of HTML and SVG as text, escaped unless they were made here.

`tag` escapes every child that is not `Markup`, so text of users (prompts, paths, names of models)
cannot become markup by being forgotten somewhere. What it writes is well-formed XML as well.
"""

from __future__ import annotations

import html
import re

# XML has no way to write these, and UTF-8 none for half a surrogate pair.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is already markup."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Text that shows as it is; characters no document may hold become U+FFFD."""
    return Markup(html.escape(_UNWRITABLE.sub("\ufffd", text)))


def tag(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """One element: `tag("th", "a < b", scope="col")`.

    `class_` and `for_` lose their underscore, others become hyphens; None leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Children one after another, plain text escaped."""
    return Markup("".join(c if isinstance(c, Markup) else escaped(c) for c in children))


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escaped(value)
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
