"""What is measured, in which order: `3:1,80,first,long;0:1,80`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PLAN = "3:1,80,4,16,first,long;0:1,80"
_WORDS = ("first", "long", "vocab")


@dataclass(frozen=True)
class Stage:
    """One row, or a few: `kind` is answer, off, first, long or vocab."""

    kind: str
    requests: int = 1
    prompt: int | None = None  # of `first`, where it is another one than that of the rest

    def __str__(self) -> str:
        if self.prompt is not None:
            return f"{self.kind} of {self.prompt} tokens"
        return self.kind if self.kind in _WORDS else f"{self.kind} of {self.requests}"


@dataclass(frozen=True)
class Group:
    """Stages for which both engines are started with `drafts` draft tokens."""

    drafts: int
    stages: tuple[Stage, ...]


def parse_plan(text: str) -> list[Group]:
    """Groups by K; ValueError says what was found and what is expected."""
    groups = []
    for part in filter(None, text.split(";")):
        drafts, colon, stages = part.partition(":")
        if not colon or not drafts.strip().isdigit():
            raise ValueError(f"--plan: {part!r} does not begin with a number of drafts and a colon")
        groups.append(Group(int(drafts), tuple(_stage(word.strip()) for word in stages.split(","))))
    if not groups:
        raise ValueError(f"--plan is empty; expected something like {DEFAULT_PLAN!r}")
    for group in groups:
        if group.drafts == 0 and any(stage.kind in ("off", "vocab") for stage in group.stages):
            raise ValueError("--plan: off and vocab need drafts; K = 0 has none")
    return groups


def _stage(word: str) -> Stage:
    if word in _WORDS:
        return Stage(word)
    if word.startswith("first") and word.removeprefix("first").isdigit():
        return Stage("first", prompt=int(word.removeprefix("first")))
    number = word.removeprefix("off")
    if not number.isdigit() or int(number) < 1:
        raise ValueError(
            f"--plan: {word!r} is not a number of requests, off and a number, first and a number "
            f"of tokens, or one of {', '.join(_WORDS)}"
        )
    return Stage("off" if word.startswith("off") else "answer", int(number))


def most_requests(group: Group, decoding: Sequence[int]) -> int:
    """Requests at once that an engine must have room for; `decoding` are beside a long prompt."""
    beside = max(decoding, default=0) + 1
    return max(beside if stage.kind == "long" else stage.requests for stage in group.stages)
