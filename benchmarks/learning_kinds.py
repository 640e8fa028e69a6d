"""Requests of several kinds that the demo's head may be weak at, made of documentation texts.

Each kind has an opening of three words of its own, which is how a server tells kinds apart. Each
passage (a paragraph of English prose in an HTML file) is used once: for one kind, and either served
or measured. Manuals repeat themselves, so nothing is measured that shares more than a fifth of its
runs of eight words with what is served. The texts of the third results page came from five Debian
12 packages, 8363 passages (those of the first from all but the last):

    apt-get download debian-handbook debian-faq developers-reference debian-history \\
        postgresql-doc-15
    for package in *.deb; do dpkg-deb -x $package texts; done
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

KINDS = {
    "summary": "Summarize this passage in two sentences:\n\n{}",
    "translation": "Translate this passage into French:\n\n{}",
    "question": "Read the passage, then answer the question.\n\nPassage: {}\n\nQuestion: What is "
    "the passage about, and what does it say the reader should do?",
    "spanish": "Put this passage into Spanish:\n\n{}",
    "german": "Say this in German:\n\n{}",
    "keywords": "List ten keywords of this passage, one on each line:\n\n{}",
    "title": "Write a title and a summary in one line for this passage:\n\n{}",
    "bullets": "Turn this passage into bullet points:\n\n{}",
    "quiz": "Make three quiz questions, each with its answer, from this passage:\n\n{}",
    "help": "Rewrite this passage as the help text of a command-line tool:\n\n{}",
    "plain": "Explain this passage in plain words, for somebody new to computers:\n\n{}",
    "facts": "Extract the facts of this passage as a JSON object:\n\n{}",
    "mail": "Tell a colleague what this passage says, in a short e-mail:\n\n{}",
}
USUAL = ("summary", "translation", "question")  # named before the first measurement
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


def trial(texts: Path, number: int) -> list[Asked]:
    """So many of each kind that there is, whose passages `requests` uses last of all."""
    found = passages(texts)[: number * len(KINDS)]
    forms = [*KINDS.items()] * number
    return [Asked(kind, form.format(own)) for (kind, form), own in zip(forms, found, strict=False)]


def requests(
    texts: Path, kinds: Sequence[str], *, served: int, measured: int
) -> tuple[list[Asked], list[Asked]]:
    """So many of each kind to serve, and at most so many to measure on."""
    found = passages(texts)
    needed = (served + measured) * len(kinds)
    if len(found) < needed:
        raise SystemExit(f"{texts} has {len(found)} passages; {needed} are needed.")
    chosen = [found.pop() for _ in range(needed)]
    cut = measured * len(kinds)
    known = set[str]().union(*map(_runs, chosen[cut:]))
    forms = [(kind, KINDS[kind]) for kind in kinds]
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
