"""Scoring a head on answers: one pass of the trunk, one unrolled head, every K at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headstart.backends.base import Backend
from headstart.errors import DataError
from headstart.models.build import LoadedModel
from headstart.models.documents import Documents
from headstart.models.unroll import teacher_states, trunk_states
from headstart.simulate.answers import Answer, Batch, answers_of, grouped
from headstart.simulate.drafting import Drafting, head_of
from headstart.simulate.expected import Expected, expectations
from headstart.simulate.matches import DraftLogits, Matches, answer_matches, unrolled
from headstart.simulate.plan import Plan
from headstart.simulate.rates import FormulaRates, Interval, Rates, formula_rates, rates
from headstart.simulate.served import ServedMatches, Text

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.vocab.draft_vocab import DraftVocab

WHOLE = "whole vocabulary"
_STATE_BYTES = 1 << 28  # of the unrolled head, per batch

# What a record's drafts are chosen from; None: the whole vocabulary.
VocabOf = Callable[["Record"], "DraftVocab | None"]
VocabName = Callable[[Answer], str | None]  # the same by a vocabulary's name at a backend
Read = tuple[list["Record"], Batch]  # records, and the trunk's states of their rows


@dataclass(frozen=True)
class Scored:
    """One way of drafting on one set of answers; by formula one result for each rule."""

    plan: Plan
    found: Rates | Mapping[str, FormulaRates]
    matches: tuple[Matches, ...] = ()  # what was replayed

    @property
    def lengths(self) -> list[float]:
        """Acceptance length by K from 0: walked if replayed, else the row average."""
        if isinstance(self.found, Rates):
            return self.found.lengths
        return self.found[self.plan.formula].lengths

    @property
    def intervals(self) -> list[Interval] | None:
        """Of these lengths, 95 %; None where there are too few prompts."""
        if isinstance(self.found, Rates):
            return self.found.walked_intervals
        return self.found[self.plan.formula].intervals

    def as_json(self) -> dict[str, Any]:
        if isinstance(self.found, Rates):
            return self.found.as_json()
        some = next(iter(self.found.values()))
        formulas = {rule: {"row_average": each.as_json()} for rule, each in self.found.items()}
        return {**vars(some.size), "formula": formulas}


@dataclass(frozen=True)
class Scores:
    """All answers, and the categories among them."""

    overall: Scored
    parts: Mapping[str, Scored]

    def as_json(self) -> dict[str, Any]:
        parts = {name: part.as_json() for name, part in self.parts.items()}
        return {"overall": self.overall.as_json(), "by_category": parts}


def score(
    built: LoadedModel,
    records: Sequence[Record],
    plan: Plan,
    *,
    max_drafts: int = 8,
    vocabs: Mapping[str, VocabOf] | None = None,
    end_ids: frozenset[int] = frozenset(),
    own: int = 0,
    progress: Callable[[int], None] = lambda num_tokens: None,
    read: Iterable[Read] | None = None,
) -> dict[str, Scores]:
    """Score every way of choosing a draft vocabulary; without `vocabs` the whole one alone.

    `own`: so many tokens of its text are drafted beside a vocabulary, as `draft_vocab_own` asks.
    `read`: what `batches` gave before, where several heads are scored on the same trunk's states.
    """
    ways = vocabs or {WHOLE: lambda record: None}
    made: dict[str, Drafting] = {}
    kept: dict[str, list[Matches | Expected]] = {name: [] for name in ways}
    for chunk, batch in read or batches(built, records, plan, max_drafts, end_ids):
        by_id = {record.id: record for record in chunk}
        with torch.inference_mode():
            depths = unrolled(
                head_of(built), built.trunk.embed, built.trunk.rotary, batch, max_drafts
            )
            for name, vocab_of in ways.items():
                choices: dict[str, list[Answer]] = {}
                for answer in batch.answers:
                    vocab = vocab_of(by_id[answer.record_id])
                    key = "" if vocab is None else vocab.name
                    if key not in made:
                        made[key] = Drafting.of(built, vocab, own)
                    choices.setdefault(key, []).append(answer)
                for key, answers in choices.items():
                    logits = made[key].logits(batch, answers)
                    kept[name] += _found(built, depths, batch, answers, logits, plan)
        progress(batch.documents.num_rows)
    return {name: _summary(found, plan, max_drafts) for name, found in kept.items()}


def is_served(backend: Backend, plan: Plan) -> bool:
    """Whether answers can be scored by a backend's own passes: one call each, so on a CPU."""
    return backend.drafts_chains and plan.method == "replay"


def score_served(
    backend: Backend,
    records: Sequence[Record],
    plan: Plan,
    *,
    max_drafts: int = 8,
    vocabs: Mapping[str, VocabOf] | None = None,
    end_ids: frozenset[int] = frozenset(),
    own: int = 0,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> dict[str, Scores]:
    """The same as `score`, by the passes of the backend that serves: see `is_served`.

    It takes the backend's K/V memory, and forgets its draft vocabularies.
    """
    ways = vocabs or {WHOLE: lambda record: None}
    longest = max(len(record.ids) for record in records)
    _check_length(backend.model, records)
    scorer = ServedMatches(backend, max_drafts, longest, own)
    kept: dict[str, list[Matches | Expected]] = {name: [] for name in ways}
    for chunk in grouped(records, scorer.max_rows):
        by_id = {record.id: record for record in chunk}
        for vocab_of in ways.values():
            for record in chunk:
                vocab = vocab_of(record)
                if vocab is not None and vocab.name not in backend.draft_vocabs:
                    backend.add_draft_vocab(vocab.name, vocab.ids)

        def name_of(vocab_of: VocabOf, known: dict[str, Record] = by_id) -> VocabName:
            def find(answer: Answer) -> str | None:
                vocab = vocab_of(known[answer.record_id])
                return None if vocab is None else vocab.name

            return find

        texts, slot = [], 0
        for index, record in enumerate(chunk):
            answers = answers_of(
                record, document=index, max_len=backend.model.max_len, params=plan.params,
                end_ids=end_ids,
            )  # fmt: skip
            texts.append(Text([int(token) for token in record.ids], answers, slot))
            slot += len(record.ids)
        found = scorer.matches(texts, {name: name_of(own) for name, own in ways.items()})
        for name, matches in found.items():
            kept[name] += matches
        progress(slot)
    return {name: _summary(found, plan, max_drafts) for name, found in kept.items()}


def _check_length(model: LoadedModel, records: Sequence[Record]) -> None:
    longest = max(records, key=lambda record: len(record.ids))
    if len(longest.ids) > model.max_len:
        raise DataError(
            f"record {longest.id} has {len(longest.ids)} tokens; the model has positions for "
            f"{model.max_len}. Make the data with this model."
        )


def _found(
    built: LoadedModel,
    depths: Sequence[torch.Tensor],
    batch: Batch,
    answers: Sequence[Answer],
    logits: DraftLogits,
    plan: Plan,
) -> Sequence[Matches | Expected]:
    if plan.method == "replay":
        return answer_matches(depths, batch, answers, logits)
    trunk, kind = built.trunk, head_of(built).layout.trunk_hidden
    return expectations(
        depths, batch, answers, logits,
        lambda states: trunk.logits(teacher_states(trunk, states, kind)),
        is_own_text=plan.is_own_text,
    )  # fmt: skip


def batches(
    built: LoadedModel, records: Sequence[Record], plan: Plan, depths: int, end_ids: frozenset[int]
) -> Iterator[Read]:
    """The records a few at a time, with the states that the trunk has for them."""
    trunk, kind = built.trunk, head_of(built).layout.trunk_hidden
    size = built.config.state_size(head_of(built).layout) * built.dtype.itemsize * max(1, depths)
    for chunk in grouped(records, max(1, _STATE_BYTES // size)):
        _check_length(built, chunk)
        documents = Documents(tuple(len(record.ids) for record in chunk))
        joined = [int(token) for record in chunk for token in record.ids]
        ids = torch.tensor(joined, device=built.device)
        answers = [
            answer
            for index, record in enumerate(chunk)
            for answer in answers_of(
                record, document=index, max_len=built.max_len, params=plan.params, end_ids=end_ids
            )
        ]
        with torch.inference_mode():
            states = trunk_states(trunk, ids, documents, kind)
        yield chunk, Batch(states, ids, documents, answers)


def _summary(found: Sequence[Matches | Expected], plan: Plan, max_drafts: int) -> Scores:
    if not found:
        raise DataError("there are no answers to score; the split is empty.")
    parts: dict[str, list[Matches | Expected]] = {}
    for each in found:
        parts.setdefault(each.answer.category, []).append(each)
    # A category without a round has no rates; its answers still count in the whole.
    groups = {name: part for name, part in sorted(parts.items()) if _has_drafts(part)}
    if not groups:
        raise DataError(
            f"every one of {len(found)} answers has a single token, which comes with the prompt: "
            "there was nothing to draft. Distill prompts with longer answers."
        )
    return Scores(
        _scored(found, plan, max_drafts),
        {name: _scored(part, plan, max_drafts) for name, part in groups.items() if len(parts) > 1},
    )


def _has_drafts(found: Sequence[Matches | Expected]) -> bool:
    return any(each.answer.num_tokens > 1 for each in found)


def _scored(found: Sequence[Matches | Expected], plan: Plan, max_drafts: int) -> Scored:
    if plan.method == "replay":
        replayed = tuple(each for each in found if isinstance(each, Matches))
        return Scored(plan, rates(replayed, max_drafts), replayed)
    return Scored(plan, formula_rates([each for each in found if isinstance(each, Expected)]))
