"""Reasoning that a model writes before its answer, split off from the answer.

How thinking is marked is data. A chat template may open the block itself, at the end of the prompt,
or close it there at once: the prompt's end says where an answer begins.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from headstart.errors import ConfigError
from headstart.families.registry import match_family
from headstart.server.grammars.specs import GrammarSpec
from headstart.server.tools.parsing import num_held

Start = Literal["open", "closed", "free"]


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around a model's thinking."""

    name: str
    begin: str
    end: str

    @property
    def markers(self) -> tuple[str, str]:
        return self.begin, self.end

    def start_in(self, prompt_tail: str) -> Start:
        """Whether the prompt ends inside of the block, behind it, or leaves it to the model."""
        tail = prompt_tail.rstrip()
        if tail.endswith(self.begin):
            return "open"
        return "closed" if tail.endswith(self.end) else "free"


REASONING_FORMATS = {
    known.name: known
    for known in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("pangu", "[unused16]", "[unused17]"),
    )
}


def reasoning_format(
    choice: str | None,
    chat_template: str | None,
    model_type: str | None = None,
    vocabulary: Collection[str] = (),
) -> ReasoningFormat | None:
    """A format by name; for None or "auto" by template and model; None where nothing is split.

    A model type alone proves nothing: a grafted checkpoint has the type of its layout. Models that
    think have the marks as tokens.
    """
    if choice in (None, "auto"):
        owner = match_family({}, (model_type or "",), ())
        for known in REASONING_FORMATS.values():
            by_family = owner is not None and owner.reasoning == known.name
            thinks = by_family and set(known.markers) <= set(vocabulary)
            if thinks or known.end in (chat_template or ""):
                return known
        return None
    if choice != "none" and choice not in REASONING_FORMATS:
        raise ConfigError(
            f"the reasoning parser is {choice!r}; expected auto, none, "
            f"{', '.join(REASONING_FORMATS)}."
        )
    return REASONING_FORMATS.get(choice or "none")


class ReasoningSplitter:
    """Takes an answer's text in pieces of any size; white space around the thinking is dropped."""

    def __init__(self, format: ReasoningFormat | None, start: Start = "free"):
        self._format = format
        self._state = "closed" if format is None else start
        self._held = ""
        self._has_begun = format is None  # something of the current part was given out

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that this text adds."""
        self._held += text
        if self._state == "free":
            self._decide()
        reasoning = self._read_reasoning() if self._state == "open" else ""
        content = self._read_content() if self._state == "closed" else ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """No more text: what was held back is given out as it is."""
        rest, self._held = self._held, ""
        if self._state == "open":
            return rest.rstrip() if self._has_begun else rest.strip(), ""
        return "", rest

    def _decide(self) -> None:
        """A block that the model opens itself stands at the very beginning."""
        assert self._format is not None
        begin, text = self._format.begin, self._held.lstrip()
        if text.startswith(begin):
            self._state, self._held = "open", text[len(begin) :]
        elif not begin.startswith(text):
            self._state, self._has_begun = "closed", True

    def _read_reasoning(self) -> str:
        assert self._format is not None
        if not self._has_begun:
            self._held = self._held.lstrip()
        text, end = self._held, self._format.end
        at = text.find(end)
        if at >= 0:
            self._state, self._held, self._has_begun = "closed", text[at + len(end) :], False
            return text[:at].rstrip()
        kept = text[: len(text) - num_held(text, (end,))].rstrip()
        self._held = text[len(kept) :]
        self._has_begun = self._has_begun or bool(kept)
        return kept

    def _read_content(self) -> str:
        text = self._held if self._has_begun else self._held.lstrip()
        self._held = ""
        self._has_begun = self._has_begun or bool(text)
        return text


def after_reasoning(
    spec: GrammarSpec, format: ReasoningFormat | None, start: Start = "free"
) -> GrammarSpec:
    """The same grammar for what follows the thinking, which stays free."""
    if format is None or start == "closed":
        return spec
    begin = "" if start == "open" else format.begin
    block = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": format.end}
    gap = {"type": "regex", "pattern": r"\s{0,4}"}
    thinking = {"type": "sequence", "elements": [block, gap]}
    first = thinking if start == "open" else {"type": "optional", "content": thinking}
    whole = {"type": "sequence", "elements": [first, spec.format]}
    return GrammarSpec.of(spec.what, whole, spec.field)
