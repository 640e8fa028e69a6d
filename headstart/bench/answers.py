"""Whether two variants wrote the same: greedy answers must not depend on drafts.

Token ids are compared where the server sends them, texts elsewhere. A turn is compared only while
the conversation was the same before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.bench.records import RequestRecord, RunRecord

_MOST_SHOWN, _AROUND = 5, 40


@dataclass(frozen=True)
class Difference:
    """The first place where two answers part; a token's index, or a character's."""

    id: str
    turn: int
    repeat: int
    position: int
    unit: str  # token or character
    base_text: str
    other_text: str


@dataclass
class Equality:
    num_compared: int = 0
    num_equal: int = 0
    num_uncompared: int = 0  # failed in one of both, or behind a turn that differs
    differences: list[Difference] = field(default_factory=list)  # the first few

    def as_json(self) -> dict[str, Any]:
        return {
            "compared": self.num_compared, "equal": self.num_equal,
            "not_compared": self.num_uncompared,
            "first_differences": [vars(difference) for difference in self.differences],
        }  # fmt: skip


def compare_answers(base: Sequence[RunRecord], other: Sequence[RunRecord]) -> Equality:
    """Answers of equal repeats, request by request."""
    found = Equality()
    by_repeat = {run.repeat: run for run in other}
    for run in base:
        if run.repeat in by_repeat:
            _compare_runs(run, by_repeat[run.repeat], found)
    return found


def compare_repeats(runs: Sequence[RunRecord]) -> Equality:
    """A variant's first repeat against its others: what differs there differs for other reasons."""
    found = Equality()
    for run in runs[1:]:
        _compare_runs(runs[0], run, found)
    return found


def _compare_runs(base: RunRecord, other: RunRecord, found: Equality) -> None:
    answers = {request.id: request for request in other.requests}
    parted: set[str] = set()  # conversations that are no longer the same
    for request in sorted(base.requests, key=lambda request: request.turn):
        twin, conversation = answers.get(request.id), request.conversation
        is_whole = twin is not None and request.is_answered and twin.is_answered
        if twin is None or not is_whole or conversation in parted:
            found.num_uncompared += 1
            parted.add(conversation)
            continue
        found.num_compared += 1
        difference = _difference(request, twin, base.repeat)
        if difference is None:
            found.num_equal += 1
            continue
        parted.add(conversation)
        if len(found.differences) < _MOST_SHOWN:
            found.differences.append(difference)


def _difference(base: RequestRecord, other: RequestRecord, repeat: int) -> Difference | None:
    if base.token_ids is not None and other.token_ids is not None:
        unit, position = "token", _first_difference(base.token_ids, other.token_ids)
    else:
        unit, position = "character", _first_difference(base.text, other.text)
    if position is None:
        return None
    at = _first_difference(base.text, other.text) or 0
    around = slice(max(0, at - _AROUND), at + _AROUND)
    return Difference(
        base.id, base.turn, repeat, position, unit, base.text[around], other.text[around]
    )


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """None for equal sequences; the shorter one's length where it is the longer one's begin."""
    if one == other:
        return None
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), shared)
