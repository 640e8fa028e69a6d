"""The language of a text, decided by its characters alone. Pure functions.

Good enough to pick a draft vocabulary, where a mistake costs a little speed and nothing else: what
matters is the script, and whether it is code. So `en` stands for every text in Latin letters.
"""

from __future__ import annotations

import re
from collections import Counter

CODE, OTHER, LATIN, CHINESE, JAPANESE = "code", "other", "en", "zh", "ja"

# language: runs of its script. Scripts in which a character is about a word come first.
_PER_CHARACTER = {
    CHINESE: "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f",
    JAPANESE: "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d",
    "ko": "\u1100-\u11ff\uac00-\ud7af",
    "th": "\u0e01-\u0e5b",
}
_PER_WORD = {
    LATIN: "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
    "ru": "\u0400-\u052f",
    "el": "\u0370-\u03ff\u1f00-\u1fff",
    "ar": "\u0600-\u06ff\u0750-\u077f",
    "he": "\u0590-\u05ff",
    "hi": "\u0900-\u097f",
}
_UNITS = re.compile(
    "|".join(
        [f"(?P<{name}>[{chars}])" for name, chars in _PER_CHARACTER.items()]
        + [f"(?P<{name}>[{chars}]+)" for name, chars in _PER_WORD.items()]
    )
)
_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CODE_LINE = re.compile(
    r"""^\s*(
        (def|class|fn|func|function|interface|struct|enum|impl|namespace|package)\s+\w+.*[({:;]?$
      | (import|from|using|use|require|\#include|\#define|export)\b\s*[\w<"'{*./:]+.*$
      | (public|private|protected|static|const|let|var|final|async|await|return)\b.*[;({=:)\w\]]$
      | (if|elif|else|for|while|try|except|finally|with|switch|case|match|do)\b.*[:{]$
      | (SELECT|INSERT|UPDATE|CREATE|DELETE)\b.*
      | [@$]\w[\w.()=\-/ ]*
      | </?[A-Za-z][^>]*>.*
      | (//|/\*|\*/|\#\ ?!|--\ ).*
      | [\w.\[\]"'*&,\ ]+\s*(=|:=|\+=|-=|=>|->|<-)\s*\S.*
      | ["'][\w. -]+["']\s*:\s*\S.*
      | [\w.]+\(.*\)\s*[;{]?
      | .*[;{}]
      | [)\]}]+[,;]?
    )\s*$""",
    re.VERBOSE,
)
_MOSTLY = 0.5
_KANA_SHARE = 0.1  # Japanese is written with many Chinese characters, Chinese without kana


def language_of(text: str) -> str:
    """`code`, the language of the script that most words have, or `other` where there is none."""
    if is_code(text):
        return CODE
    units = script_units(text)
    if not units:
        return OTHER
    han, kana = units[CHINESE], units[JAPANESE]
    if kana and kana >= _KANA_SHARE * (han + kana):
        units[JAPANESE] += units.pop(CHINESE, 0)
    # Ties go to the script that is listed first, so that the answer does not depend on word order.
    order = [*_PER_CHARACTER, *_PER_WORD]
    return max(units, key=lambda name: (units[name], -order.index(name)))


def script_units(text: str) -> Counter[str]:
    """How many words each script has; a character counts as a word where words are not spaced."""
    return Counter(match.lastgroup or OTHER for match in _UNITS.finditer(text))


def is_code(text: str) -> bool:
    """Whether most of a text is code: inside fences or, without any, by the look of its lines."""
    fenced = sum(len(match[1].strip()) for match in _FENCED.finditer(text))
    if fenced:
        return fenced >= _MOSTLY * len(text.strip())
    return code_line_share(text) > _MOSTLY


def code_line_share(text: str) -> float:
    """Share of lines that look like code; one line alone is too little to tell."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        return 0.0
    return sum(_CODE_LINE.match(line) is not None for line in lines) / len(lines)
