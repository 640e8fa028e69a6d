"""From files of packages to passages: paragraphs of prose in six languages, functions of code.

Pure functions of text: what is downloaded and unpacked is `collect.py`'s.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import PurePath

# Words that hardly any text of a language lacks; together a twelfth of it at least.
_WORDS = {
    "en": "the and of to is that in for with this are be it as can not",
    "fr": "le la les des est et une dans pour que vous sur qui pas avec par",
    "de": "der die das und ist nicht mit ein eine von zu den werden sie auf für",
    "es": "el la los las que una para con por del se es en como más este",
    "it": "il la che di per un una con del è non sono della in le come",
    "pt": "o a os as que uma para com não do da em é por mais como",
}
_LEAST_SHARE = 1 / 12
_PROSE_MARKS = re.compile(r"[{}<>|\\_=#@*~^`]")
_MOST_MARKS = 0.02  # of the characters: more is a table, a listing or markup
_PARAGRAPH = (80, 2400)  # characters of one paragraph
# Characters of a passage, and the share of passages that are so long.
SIZES = ((180, 600, 0.6), (600, 1500, 0.3), (1500, 3600, 0.1))
_FUNCTION = (150, 1800)  # characters of a function
_BRACED = {
    ".go": ("go", re.compile(r"^func [\w( ]")),
    ".rs": ("rust", re.compile(r"^ *(pub(\(crate\))? )?fn \w")),
    ".js": ("javascript", re.compile(r"^ *(async )?function \w")),
    ".c": ("c", re.compile(r"^(static |const |unsigned )*\w+ \*?\w+ ?\([^;]*$")),
}


_TAG = (
    "(?:ar|bg|ca|cs|da|de|el|en|eo|es|et|eu|fa|fi|fr|gl|he|hi|hr|hu|id|it|ja|ko|lt|lv|nb|nl|nn|pl|"
    r"pt|ro|ru|sk|sl|sr|sv|th|tr|uk|vi|zh)(?:[_-][A-Za-z]{2})?(?:@\w+)?"
)
_FOLDER = re.compile(f"{_TAG}|C")  # C is how some packages call English
_IN_NAME = re.compile(rf"[._-]{_TAG}(?=\.)")
_AT_END = re.compile(f"-{_TAG}$")


@dataclass(frozen=True)
class Passage:
    """A text that tasks are made of."""

    text: str
    language: str  # en, fr, ... for prose; python, go, ... for code
    is_code: bool
    package: str
    document: str = ""  # of translated texts: a name that all languages share

    @property
    def sha(self) -> str:
        """Of the text; white space and case do not count."""
        plain = " ".join(self.text.casefold().split())
        return hashlib.sha256(plain.encode()).hexdigest()

    @property
    def split_key(self) -> str:
        """Decides what is held out: a text and its translations are on one side."""
        return self.document or self.sha


def document_of(path: PurePath, package: str, packages: Iterable[str]) -> str:
    """What a text shares with its translations alone; nothing where it has none.

    Where `packages` has the manual in other languages, too (manual, manual-fr), the whole manual;
    else the page, if its path (fr/page.html, page.fr.html) names a language.
    """
    family = family_of(package)
    if sum(family_of(name) == family for name in packages) > 1:
        return family
    folders = [part for part in path.parent.parts if not _FOLDER.fullmatch(part)]
    plain = PurePath(*folders, _IN_NAME.sub("", path.name))
    return "" if plain == path else f"{family}/{plain}"


def family_of(package: str) -> str:
    """The name of a package without a language at its end."""
    return _AT_END.sub("", package)


def passages_of(name: str, text: str, package: str, document: str = "") -> Iterator[Passage]:
    """The passages of one file, by the end of its name."""
    suffix = name[name.rfind(".") :].lower()
    if suffix == ".py":
        yield from (Passage(part, "python", True, package) for part in python_functions(text))
    elif suffix in _BRACED:
        language, starts = _BRACED[suffix]
        for part in braced_functions(text, starts):
            yield Passage(part, language, True, package)
    else:
        is_page = suffix in (".html", ".htm", ".xhtml", ".page", ".xml")
        paragraphs = page_paragraphs(text) if is_page else text_paragraphs(text)
        for part in joined(filter(is_prose, paragraphs)):
            spoken = language_of(part)
            if spoken is not None:
                yield Passage(part, spoken, False, package, document)


def language_of(text: str) -> str | None:
    """By common words; None where no language has enough of them."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    found = {name: sum(w in own for w in words) for name, own in _SETS.items()}
    best = max(found, key=lambda name: found[name])
    return best if words and found[best] >= _LEAST_SHARE * len(words) else None


_SETS = {name: frozenset(words.split()) for name, words in _WORDS.items()}


def is_prose(paragraph: str) -> bool:
    """A sentence or more, and no table, listing, licence header or list of names."""
    low, high = _PARAGRAPH
    if not low <= len(paragraph) <= high or not re.search(r"[.!?:]['\")]?$", paragraph):
        return False
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    marks = len(_PROSE_MARKS.findall(paragraph))
    return letters >= 0.85 * len(paragraph) and marks <= _MOST_MARKS * len(paragraph)


def joined(paragraphs: Iterable[str]) -> Iterator[str]:
    """Neighbours put together up to sizes that follow from the text itself; each is used once."""
    waiting: list[str] = []
    limit = 0
    for paragraph in paragraphs:
        if waiting and sum(map(len, waiting)) + len(paragraph) > limit:
            yield from _long_enough(waiting)
            waiting = []
        if not waiting:
            limit = _size(paragraph)
        waiting.append(paragraph)
        if sum(map(len, waiting)) >= 0.8 * limit:
            yield from _long_enough(waiting)
            waiting = []
    yield from _long_enough(waiting)


def _long_enough(paragraphs: list[str]) -> Iterator[str]:
    text = "\n\n".join(paragraphs)
    if len(text) >= SIZES[0][0]:
        yield text


def _size(text: str) -> int:
    """The most characters of a passage that begins so."""
    drawn = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
    for low, high, share in SIZES:
        if drawn < share:
            return low + int((high - low) * drawn / share)
        drawn -= share
    return SIZES[-1][1]


def text_paragraphs(text: str) -> Iterator[str]:
    """What empty lines part, on one line each."""
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        if lines[0][:1] in (" ", "\t") and len({line[:4].strip() for line in lines}) > 1:
            continue  # a listing
        yield re.sub(r"\s+", " ", block).strip()


class _Paragraphs(HTMLParser):
    """Texts of <p>, <li> and <dd> of HTML and of Mallard pages."""

    KEPT, SKIPPED = {"p", "li", "dd", "para"}, {"pre", "code", "script", "style", "table"}

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._text: list[str] = []
        self._depth = self._skipped = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in self.SKIPPED:
            self._skipped += tag != "code"  # words of code within a sentence stay
        if tag in self.KEPT:
            self._end()
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIPPED:
            self._skipped -= tag != "code" and self._skipped > 0
        if tag in self.KEPT and self._depth:
            self._end()
            self._depth -= 1

    def handle_data(self, data: str) -> None:
        if self._depth and not self._skipped:
            self._text.append(data)

    def _end(self) -> None:
        text = re.sub(r"\s+", " ", "".join(self._text)).strip().replace("¶", "")
        if text:
            self.found.append(text)
        self._text = []


def page_paragraphs(text: str) -> list[str]:
    parser = _Paragraphs()
    parser.feed(text)
    return parser.found


def python_functions(text: str) -> Iterator[str]:
    """Functions and methods with their own indentation taken off, but none within another."""
    try:
        waiting: list[ast.AST] = [ast.parse(text)]
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                part = lines[node.lineno - 1 : node.end_lineno]
                yield from _function("\n".join(line[node.col_offset :] for line in part))
            else:
                waiting.append(node)


def braced_functions(text: str, starts: re.Pattern[str]) -> Iterator[str]:
    """From a line that begins a function to the line that closes its braces."""
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        if not starts.match(lines[place]):
            place += 1
            continue
        depth, end, has_begun = 0, place, False
        while end < len(lines) and end < place + 80:
            depth += lines[end].count("{") - lines[end].count("}")
            has_begun = has_begun or "{" in lines[end]
            end += 1
            if has_begun and depth <= 0:
                indent = len(lines[place]) - len(lines[place].lstrip())
                yield from _function("\n".join(line[indent:] for line in lines[place:end]))
                break
        place = end


def _function(text: str) -> Iterator[str]:
    low, high = _FUNCTION
    if low <= len(text) <= high and text.count("\n") >= 4 and max(map(len, text.split("\n"))) < 160:
        yield text.rstrip()
