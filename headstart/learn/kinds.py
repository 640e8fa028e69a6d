"""Kinds of requests, by how their prompts begin: what keeps a sample from being all of one kind.

Requests that a program makes begin alike ("Summarize this passage ..."); requests of people do not.
An opening that came often is a kind of its own, all others are one kind. Which openings came often
is counted in bounded memory.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")

OTHER = "other"
_WORDS = 3
_LONGEST = 48  # characters of a kind's name
_OFTEN = 4  # times that an opening must have come to be a kind
_MOST = 1 << 14  # openings that are counted at once: some 4 MB


class Kinds:
    """Counts openings; the one that has not come for longest makes room for a new one.

    So a kind is found that comes once among some thousand requests whose openings are all new.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._known: frozenset[str] = frozenset()

    def know(self, kinds: Iterable[str]) -> None:
        """These are kinds already, of texts that were kept before; for any thread."""
        self._known = frozenset(kinds) - {OTHER}

    def kind_of(self, prompt: object) -> str:
        """The kind of a prompt as it was given: a text, or a list of messages."""
        opening = opening_of(prompt)
        if not opening:
            return OTHER
        count = self._counts[opening] = self._counts.get(opening, 0) + 1
        self._counts.move_to_end(opening)
        if len(self._counts) > _MOST:
            self._counts.popitem(last=False)
        return opening if count >= _OFTEN or opening in self._known else OTHER


def numbered(by_kind: Mapping[str, Value]) -> dict[str, Value]:
    """The same with a number in place of each name, which is words of prompts."""
    return {str(number): value for number, value in enumerate(by_kind.values(), 1)}


def opening_of(prompt: object) -> str:
    """The first words of the last message of a user, or of a text; "" where there are none."""
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt):
        asked = [part for part in prompt if part.get("role") == "user"]
        text = _text(asked[-1].get("content")) if asked else ""
    else:
        return ""
    words = re.findall(r"\w+", text[:400].lower())
    return " ".join(words[:_WORDS])[:_LONGEST]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return next((part for part in parts if isinstance(part, str)), "")
    return ""
