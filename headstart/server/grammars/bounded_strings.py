"""JSON strings of limited length, written so that their masks are known when they are compiled.

xgrammar writes a string of up to 60 characters as a quote, `character{0, 60}` and a quote. What
follows the repetition is no part of its rule, so near the end of such a string thousands of tokens,
all that are longer than what is left, are tried one by one whenever a mask is asked for: 1 to 5 ms.
Here the same texts have a rule for every number of characters that may still come, each with the
closing quote: a token that is too long fits none of them, which is found once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

# Longer strings: rules and masks would grow with the square, and xgrammar's own take 0.1 ms there.
MOST_CHARACTERS = 200
_MOST_SQUARES = 4 * MOST_CHARACTERS**2  # of lengths in one tag: some 50 MB of masks
_RULE = re.compile(r"(?P<name>\w+) ::= (?P<body>.*)")
_STRING = re.compile(r'\(\("\\"" (?P<character>\w+)\{(?P<least>\d+), (?P<most>\d+)\} "\\""\)\)')
_CHARACTER = re.compile(r"\(\(\[(?:[^\]\\]|\\.)*\]\)\)")  # one class of characters
_OWN_KEYS = {"type", "json_schema", "style", "max_whitespace_cnt"}

# The grammar of a JSON schema, as EBNF: the schema, and how many spaces may stand between parts.
SchemaText = Callable[[Any, int], str]


class Room:
    """What masks of strings may still take in one tag."""

    def __init__(self) -> None:
        self._squares = _MOST_SQUARES

    def takes(self, characters: int) -> bool:
        if characters > MOST_CHARACTERS or characters**2 > self._squares:
            return False
        self._squares -= characters**2
        return True


def with_quick_strings(
    format: Any, schema_text: SchemaText, is_parsed: Callable[[str], bool], room: Room | None = None
) -> Any:
    """A structural tag's format in which schemas with bounded strings are grammars.

    `is_parsed`: whether xgrammar reads the text of a grammar as what it wrote. Where it does not,
    or nothing would be gained, a schema stays as it is. Strings that come when there is no `room`
    left stay, too.
    """
    room = room or Room()
    if isinstance(format, list):
        return [with_quick_strings(each, schema_text, is_parsed, room) for each in format]
    if not isinstance(format, Mapping):
        return format
    if format.get("type") != "json_schema":
        return {
            name: with_quick_strings(value, schema_text, is_parsed, room)
            for name, value in format.items()
        }
    if set(format) != _OWN_KEYS or format["style"] != "json":
        return format
    if '"maxLength"' not in json.dumps(format["json_schema"]):
        return format
    text = schema_text(format["json_schema"], format["max_whitespace_cnt"])
    quick = quick_strings(text, room)
    return {"type": "grammar", "grammar": quick} if quick != text and is_parsed(text) else format


def quick_strings(text: str, room: Room) -> str:
    """A grammar, one rule in a line as xgrammar writes it, with its bounded strings rewritten."""
    rules = {m["name"]: m["body"] for line in text.splitlines() if (m := _RULE.fullmatch(line))}
    lines = []
    for line in text.splitlines():
        name, _, body = line.partition(" ::= ")
        found = _STRING.fullmatch(body)
        own = _chain(name, found, rules) if found is not None else {}
        is_new = own and own.keys() & rules.keys() == {name} and room.takes(len(own) - 2)
        lines += [f"{each} ::= {rest}" for each, rest in own.items()] if is_new else [line]
    return "\n".join(lines) + "\n"


def _chain(name: str, found: re.Match[str], rules: Mapping[str, str]) -> dict[str, str]:
    """Rules of a string; `name_left_N` is its rest where N more characters may come."""
    character, least, most = found["character"], int(found["least"]), int(found["most"])
    is_class = _CHARACTER.fullmatch(rules.get(character, ""))
    if not is_class or not 0 < most <= MOST_CHARACTERS or least > most:  # before rules are made
        return {}
    chain = {name: rf'(("\"" {name}_left_{most}))'}
    for left in range(most, -1, -1):
        choices = [r'("\"")'] if most - left >= least else []
        choices += [f"({character} {name}_left_{left - 1})"] if left else []
        chain[f"{name}_left_{left}"] = f"({' | '.join(choices)})"
    return chain
