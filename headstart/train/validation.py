"""Validation by the exact simulator: what the head in training would do for held-out answers.

Always in context `prefix`, which is what serving has, and with the sampling under which an answer
was written where its noise is known. Of other answers (a server's, imported ones) the arg-max
drafts are compared with the text: lower than what sampling would accept, and good to compare heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headstart.data.records import Record
from headstart.sampling.acceptance import Acceptance
from headstart.simulate.answers import GREEDY, Answer, answers_of, params_of
from headstart.simulate.answers import Batch as Scored
from headstart.simulate.matches import DraftLogits, answer_matches, walk
from headstart.simulate.own_columns import OwnColumns
from headstart.train.learner import Learner
from headstart.train.packing import Row, pack
from headstart.train.parallel import World
from headstart.train.step import Batch


@dataclass(frozen=True)
class Validation:
    """Rounds walked with K drafts over the held-out answers."""

    total: Acceptance
    by_category: dict[str, Acceptance]

    @property
    def length(self) -> float:
        return self.total.length

    def as_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.total.length,
            "cumulative_acceptance": self.total.cumulative,
            "conditional_acceptance": self.total.conditional,
            "rounds": self.total.rounds,
            "by_category": {
                name: {
                    "acceptance_length": part.length,
                    "cumulative_acceptance": part.cumulative,
                }
                for name, part in sorted(self.by_category.items())
            },
        }


def validate(
    learners: Sequence[Learner],
    records: Sequence[Record],
    prepare: Callable[[Row], Batch],
    *,
    pack_tokens: int,
    max_len: int,
    world: World,
) -> list[Validation]:
    """One pass of the trunk over `records` for all heads; every process gets the whole result.

    `max_len` is the model's own: an answer that ended by itself could have gone on that far.
    """
    rows = pack(records, pack_tokens)
    # Processes that share one set of weights must run every pass together.
    is_split = not any(learner.is_sharded for learner in learners)
    mine = rows[world.rank :: world.size] if is_split else rows
    found: list[list[tuple[str, Acceptance]]] = [[] for _ in learners]
    for row in mine:
        batch = prepare(row)
        for parts, learner in zip(found, learners, strict=True):
            parts.extend(walked(learner, row, batch, max_len))
    gathered = world.gather(found) if is_split else [found]
    return [_added(part for one in gathered for part in one[i]) for i in range(len(learners))]


@torch.no_grad()
def walked(learner: Learner, row: Row, batch: Batch, max_len: int) -> list[tuple[str, Acceptance]]:
    """Category and counters of each answer in a packed row."""
    num_drafts = learner.options.num_depths
    answers = [
        answer
        for i, record in enumerate(row.records)
        for answer in validated_answers(record, i, max_len)
    ]
    depths = learner.draft(
        batch.embedded, batch.rotary, batch.states, batch.documents,
        num_depths=num_drafts, context="prefix", rows=_drafting_rows(answers, batch),
    )  # fmt: skip
    scored = Scored(batch.states, batch.ids, batch.documents, answers)
    matches = answer_matches(depths, scored, answers, _logits(learner, batch))
    return [(found.answer.category, walk(found, num_drafts)) for found in matches]


def _logits(learner: Learner, batch: Batch) -> DraftLogits:
    """What is drafted from: the draft vocabulary, and the texts' own tokens where they count."""
    lm_heads, columns = (learner.lm_head, *learner.own_lm_heads), None
    listed = learner.lm_head.vocab_ids
    if learner.own_rule is not None and listed is not None:
        both = zip(batch.documents.starts, batch.documents.lengths, strict=True)
        texts = [(first, batch.ids[first : first + length].tolist()) for first, length in both]
        columns = OwnColumns.of(learner.own_rule, listed, texts)
        lm_heads = tuple(lm_head.beside(columns.extra) for lm_head in lm_heads)
    shared, *own = (DraftLogits.of_weight(lm_head.draft_weight).compute for lm_head in lm_heads)
    return DraftLogits(shared, lm_heads[0].vocab_ids, tuple(own), columns)


def _drafting_rows(answers: Sequence[Answer], batch: Batch) -> torch.Tensor:
    """Rows that rounds begin at: from the one that chose an answer's first token on."""
    first = [batch.documents.starts[answer.document] + answer.start - 1 for answer in answers]
    rows = [
        torch.arange(start, start + answer.num_tokens)
        for start, answer in zip(first, answers, strict=True)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *rows]).to(batch.ids.device)


def validated_answers(record: Record, document: int, max_len: int) -> list[Answer]:
    """Answers with the noise that chose them, else to be compared with arg-max drafts."""
    params = params_of(record.sampling) if record.is_replayable else GREEDY
    return answers_of(record, document=document, max_len=max_len, params=params)


def _added(parts: Iterable[tuple[str, Acceptance]]) -> Validation:
    total, by_category = Acceptance(), dict[str, Acceptance]()
    for category, counters in parts:
        total.add(counters)
        by_category.setdefault(category or "all", Acceptance()).add(counters)
    return Validation(total, by_category)
