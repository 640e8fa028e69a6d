"""Tasks of several kinds, made of passages: pure functions of the passage.

Which passage is held out is decided by a hash of its text, or of its document's name where there
are translations (`Passage.split_key`). Held-out tasks are put in words that no task to learn from
has: a head that only knows our wordings gains nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passages import Passage

SUMMARY, ANSWER, TRANSLATION, CODE, REWRITING = (
    "summary", "answer", "translation", "code-task", "rewriting",
)  # fmt: skip
SCORED_KINDS = (SUMMARY, ANSWER, TRANSLATION, CODE)
TEST, VALIDATION, TRAIN = "test", "validation", "train"
TEST_SHARE = VALIDATION_SHARE = 0.03

_LANGUAGES = {"fr": "French", "de": "German", "es": "Spanish", "it": "Italian", "pt": "Portuguese"}
# By kind: wordings to learn from, and one that only held-out tasks have. {} is the passage,
# {term} a word of it, {language} a language.
_WORDINGS: dict[str, tuple[tuple[str, ...], str]] = {
    SUMMARY: (
        (
            "Summarize the following text:\n\n{}", "{}\n\nGive a short summary of this.",
            "Write a summary of this text in three sentences.\n\n{}", "TL;DR\n\n{}",
            "What are the main points of this text?\n\n{}", "Text: {}\n\nSummary:",
            "Sum up the passage below in your own words.\n\n{}",
            "Please give me the key points as a list:\n\n{}",
        ),
        "Here is a passage. In a few sentences, say what it comes down to.\n\n\"{}\"",
    ),
    ANSWER: (
        (
            "{}\n\nWhat does the text say about {term}?",
            "Answer from the text below. What is {term}?\n\nText: {}",
            "Context: {}\n\nQuestion: Why does {term} matter here?\nAnswer:",
            "Read this and explain what the reader should know about {term}.\n\n{}",
            "{}\n\nAccording to this text, how is {term} used?",
            "Use only the passage to answer.\n\nPassage: {}\n\nQuestion: What is said of {term}?",
        ),
        "I have a question on this passage:\n\n{}\n\nWhat role does {term} play in it?",
    ),
    TRANSLATION: (
        (
            "Translate into {language}:\n\n{}", "Translate the following text to {language}.\n\n{}",
            "{}\n\nTranslate this to {language}, please.",
            "How do you say this in {language}?\n\n{}",
            "You are a translator. Give me the {language} version of this text:\n\n{}",
        ),
        "I need this passage in {language}:\n\n{}",
    ),
    CODE: (
        (
            "Explain what this {language} code does:\n\n```{tag}\n{}\n```",
            "```{tag}\n{}\n```\n\nAdd comments to this code.",
            "Write a docstring for this function.\n\n```{tag}\n{}\n```",
            "Rewrite this function so that it checks its arguments:\n\n```{tag}\n{}\n```",
            "Is there a bug in this code?\n\n```{tag}\n{}\n```",
            "Write unit tests for the following function.\n\n{}",
            "Rename the variables in this code to clearer names.\n\n```{tag}\n{}\n```",
            "Translate this {language} function to another language you know.\n\n{}",
            "How could this code be made shorter?\n\n```\n{}\n```",
        ),
        "Go through this {language} code step by step, then show a simpler version.\n\n{}",
    ),
    REWRITING: (
        (
            "Rewrite this in simpler words:\n\n{}",
            "Give this text a title, then rewrite it.\n\n{}",
            "Turn this text into a list of steps.\n\n{}", "Make this text more formal.\n\n{}",
            "Write an email to a colleague that explains this:\n\n{}", "Continue this text:\n\n{}",
            "Write three questions about this text, with answers.\n\n{}",
            "Explain this to a child:\n\n{}", "Correct the grammar of this text:\n\n{}",
        ),
        "Put this passage in other words, as for a newspaper.\n\n{}",
    ),
}  # fmt: skip
# What is asked in other languages, of texts in them.
_FOREIGN = {
    "fr": ("Résume ce texte :\n\n{}", "De quoi parle ce texte ?\n\n{}"),
    "de": ("Fasse diesen Text zusammen:\n\n{}", "Wovon handelt dieser Text?\n\n{}"),
    "es": ("Resume este texto:\n\n{}", "¿De qué trata este texto?\n\n{}"),
    "it": ("Riassumi questo testo:\n\n{}", "Di cosa parla questo testo?\n\n{}"),
    "pt": ("Resuma este texto:\n\n{}", "De que trata este texto?\n\n{}"),
}
FOLLOW_UPS = (
    "Can you explain that in simpler terms?", "Make it shorter.", "Give me an example.",
    "Why is that?", "Can you say more about the first point?", "Rewrite it as a list.",
    "Are you sure? Check it again.", "Now write it as a short email.", "What else should I know?",
    "Thanks. Can you summarize it in one sentence?",
)  # fmt: skip
_FOLLOWED = 0.15  # of the tasks have a second turn
_SHARES = {SUMMARY: 0.26, ANSWER: 0.26, TRANSLATION: 0.26, REWRITING: 0.22}


@dataclass(frozen=True)
class Task:
    """What is asked, in one turn or more."""

    id: str
    category: str
    turns: tuple[str, ...]
    split: str
    source: str

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.id, "category": self.category, "turns": list(self.turns),
            "split": self.split, "source": self.source,
        }  # fmt: skip


def split_of(key: str) -> str:
    """Where a text belongs, by its key alone; not by the order in which passages are chosen."""
    place = Draw(f"split {key}").share()
    if place < TEST_SHARE:
        return TEST
    return VALIDATION if place < TEST_SHARE + VALIDATION_SHARE else TRAIN


def tasks(passages: Sequence[Passage], each: int = 1) -> Iterator[Task]:
    """`each` tasks of different kinds for every passage; one for a held-out passage."""
    for passage in passages:
        split = split_of(passage.split_key)
        for number in range(1 if split == TEST else each):
            task = _task(passage, split, number)
            if task is not None:
                yield task


def _task(passage: Passage, split: str, number: int) -> Task | None:
    draw = Draw(f"{passage.sha} {number}")
    kind = _kind(passage, draw)
    wordings, heldout = _WORDINGS[kind]
    words = heldout if split == TEST else draw.one(wordings)
    language = passage.language
    if not passage.is_code:
        language = "English" if language != "en" else draw.one(tuple(_LANGUAGES.values()))
    if passage.language in _FOREIGN and kind != TRANSLATION and split != TEST:
        words = draw.one(_FOREIGN[passage.language])
    term = term_of(passage.text, draw) if kind == ANSWER else ""
    if term is None:
        return None
    asked = words.replace("{language}", language).replace("{term}", term)
    asked = asked.replace("{tag}", passage.language).replace("{}", passage.text)
    follows = split != TEST and draw.share() < _FOLLOWED
    turns = (asked, draw.one(FOLLOW_UPS)) if follows else (asked,)
    return Task(f"{passage.sha[:16]}-{number}", kind, turns, split, passage.package)


def _kind(passage: Passage, draw: Draw) -> str:
    if passage.is_code:
        return CODE
    if passage.language != "en":
        return TRANSLATION if draw.share() < 0.6 else SUMMARY
    drawn = draw.share()
    for kind, share in _SHARES.items():
        if drawn < share:
            return kind
        drawn -= share
    return REWRITING


def term_of(text: str, draw: Draw) -> str | None:
    """Something that the text speaks of: a name, or a long word that comes more than once."""
    names = re.findall(r"(?<=[a-z,] )[A-Z][\w-]{2,}(?: [A-Z][\w-]+)*", text)
    words = re.findall(r"\b[a-z]{6,}\b", text)
    often = [word for word in dict.fromkeys(words) if words.count(word) > 1]
    found = list(dict.fromkeys([*names, *often])) or list(dict.fromkeys(words))
    return draw.one(found) if found else None


class Draw:
    """Numbers that follow from a text alone."""

    def __init__(self, text: str) -> None:
        self._text, self._count = text, 0

    def share(self) -> float:
        """From 0 to below 1."""
        self._count += 1
        digest = hashlib.sha256(f"{self._text} {self._count}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    def one(self, choices: Sequence[str]) -> str:
        return choices[int(self.share() * len(choices))]
