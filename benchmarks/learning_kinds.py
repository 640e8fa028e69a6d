"""Requests of three kinds that the demo's head is weak at, made of documentation texts.

Each passage (a paragraph of English prose in an HTML file) is used once: for one kind, and either
served or measured. Manuals repeat themselves, so nothing is measured that shares more than a fifth
of its runs of eight words with what is served. The texts of the third results page came from five
Debian 12 packages, 8363 passages (those of the first from all but the last):

    apt-get download debian-handbook debian-faq developers-reference debian-history \\
        postgresql-doc-15
    for package in *.deb; do dpkg-deb -x $package texts; done
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

KINDS = {  # named before the measurement; a trial of minutes had seen them
    "summary": "Summarize this passage in two sentences:\n\n{}",
    "translation": "Translate this passage into French:\n\n{}",
    "question": "Read the passage, then answer the question.\n\nPassage: {}\n\nQuestion: What is "
    "the passage about, and what does it say the reader should do?",
}
_SHORTEST, _LONGEST = 180, 560  # characters of a passage


@dataclass(frozen=True)
class Asked:
    kind: str
    text: str


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "p":
            self._open = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "p" and self._open is not None:
            self.found.append(re.sub(r"\s+", " ", "".join(self._open)).strip())
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open.append(data)


def passages(texts: Path) -> list[str]:
    """Paragraphs of English prose, each once, in an order that depends on the texts alone."""
    found: dict[str, None] = {}
    for path in filter(Path.is_file, sorted(texts.rglob("*.html"))):
        parser = _Paragraphs()
        parser.feed(path.read_text(encoding="utf-8", errors="replace"))
        for text in parser.found:
            if _SHORTEST <= len(text) <= _LONGEST and _is_english(text):
                found[text] = None
    result = list(found)
    random.Random(1).shuffle(result)
    return result


def requests(texts: Path, *, served: int, measured: int) -> tuple[list[Asked], list[Asked]]:
    """So many of each kind to serve, and at most so many to measure on."""
    found = passages(texts)
    needed = (served + measured) * len(KINDS)
    if len(found) < needed:
        raise SystemExit(f"{texts} has {len(found)} passages; {needed} are needed.")
    chosen = [found.pop() for _ in range(needed)]
    cut = measured * len(KINDS)
    known = set[str]().union(*map(_runs, chosen[cut:]))
    forms = [*KINDS.items()]
    parts: tuple[list[Asked], list[Asked]] = ([], [])
    for number, passage in enumerate(chosen):
        kind, form = forms[number % len(forms)]
        is_measured = number < cut
        if not is_measured or is_new(passage, known):
            parts[is_measured].append(Asked(kind, form.format(passage)))
    return parts


def is_new(passage: str, known: set[str]) -> bool:
    """Whether hardly any of its runs of words are among the known ones."""
    own = _runs(passage)
    return len(own & known) <= 0.2 * len(own)


def _runs(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[at : at + 8]) for at in range(len(words) - 7)}


def _is_english(text: str) -> bool:
    words = re.findall(r"[a-z']+", text.lower())
    common = sum(word in {"the", "and", "of", "to", "is", "that"} for word in words)
    return text.isascii() and common >= 0.1 * len(words)
