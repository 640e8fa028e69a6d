"""From counted answers to draft vocabularies: groups, sizes tried, the one taken.

Coverage and predictions are measured on held-out answers of the same group, never on those that
were counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headstart.errors import DataError
from headstart.vocab.draft_vocab import ALL, DraftVocab
from headstart.vocab.own_tokens import OwnRule
from headstart.vocab.ranking import Answer, Counts, GroupOf, answer_ids, coverage, rank
from headstart.vocab.sizes import ENOUGH_COVERAGE, SizeResult, choose_size, drafting_pays


@dataclass(frozen=True)
class Prediction:
    """What a simulator says of one draft vocabulary."""

    acceptance_length: float
    speed: float  # relative to no drafts at all
    drafts: int | None = None  # the K that both are of


# Told a vocabulary and the held-out answers that it is for.
Simulate = Callable[[DraftVocab, Sequence[Answer]], Prediction]


@dataclass(frozen=True)
class Group:
    """Answers of one language or label."""

    name: str
    counts: Counter[int]
    heldout: tuple[Answer, ...] = ()

    @property
    def num_counted(self) -> int:
        return self.counts.total()


@dataclass(frozen=True)
class Made:
    """A draft vocabulary with the sizes that were tried for it."""

    vocab: DraftVocab
    candidates: tuple[SizeResult, ...]
    num_counted: int

    @property
    def note(self) -> str | None:
        """Why the size was not chosen by speed although speeds were predicted."""
        tried = self.candidates
        if len(tried) < 2 or tried[0].predicted_speed is None or drafting_pays(tried):
            return None
        return (
            f"{self.vocab.name}: no size is predicted to be faster than another, because this "
            f"head's drafts do not pay; taken is the smallest that covers {ENOUGH_COVERAGE:.0%}, "
            "else the largest. A better trained head may choose otherwise (--head)"
        )

    def as_json(self) -> dict[str, Any]:
        vocab = {k: v for k, v in asdict(self.vocab).items() if k != "ids"}
        sizes = [asdict(candidate) for candidate in self.candidates]
        return {
            **vocab, "size": len(self.vocab.ids), "counted_tokens": self.num_counted,
            "candidates": sizes,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    """What of a model goes into every vocabulary that is made for it."""

    vocab_size: int
    tokenizer_sha: str | None
    forced: frozenset[int]
    own: int = 0  # tokens of its text that a request will draft beside a map
    languages: bool = True  # whether groups are languages, or users' labels


def grouped(
    counts: Mapping[str, Counter[int]],
    heldout: Iterable[Answer],
    group_of: GroupOf,
    *,
    min_tokens: int,
) -> tuple[list[Group], list[str]]:
    """Groups that are large enough for a ranking, and all answers together; notes on the rest."""
    everything: Counter[int] = Counter()
    for found in counts.values():
        everything.update(found)
    if not everything:
        raise DataError("there are no answer tokens to count; the data set is empty.")
    held: dict[str, list[Answer]] = {}
    for answer in heldout:
        held.setdefault(group_of(answer), []).append(answer)
    large = {name: c for name, c in counts.items() if name != ALL and c.total() >= min_tokens}
    notes = [
        f"{name}: {c.total()} answer tokens are too few for a map of its own (--min-tokens)"
        for name, c in sorted(counts.items())
        if name != ALL and name not in large
    ]
    groups = [Group(name, c, tuple(held.get(name, ()))) for name, c in sorted(large.items())]
    if len(counts) > 1 or not large:
        groups.append(Group(ALL, everything, tuple(a for some in held.values() for a in some)))
    return groups, notes


def make(group: Group, model: Model, sizes: Sequence[int], simulate: Simulate | None) -> Made:
    """Rank, try every size, take the best."""
    check_counts(group.counts, model.vocab_size)
    written: Counter[int] = Counter()
    for answer in group.heldout:
        written.update(answer_ids(answer))
    tried = []
    for size in sizes:
        ids = rank(group.counts, size=size, forced=model.forced, vocab_size=model.vocab_size)
        vocab = DraftVocab(
            ids=ids, name=group.name, vocab_size=model.vocab_size,
            language=group.name if model.languages and group.name != ALL else "",
            tokenizer_sha=model.tokenizer_sha, coverage=coverage(ids, written),
            forced=len(model.forced),
        )  # fmt: skip
        result = SizeResult(size=size, coverage=_drafted_share(vocab, group.heldout, model))
        if simulate is not None and group.heldout:
            found = simulate(vocab, group.heldout)
            result = replace(
                result, acceptance_length=found.acceptance_length, predicted_speed=found.speed,
                drafts=found.drafts,
            )  # fmt: skip
        tried.append((result, vocab))
    candidates = tuple(result for result, _ in tried)
    chosen = candidates[0] if len(candidates) == 1 else choose_size(candidates)
    return Made(dict(tried)[chosen], candidates, group.num_counted)


def _drafted_share(vocab: DraftVocab, answers: Sequence[Answer], model: Model) -> float | None:
    """Of held-out answer tokens, those that can be drafted with the texts' own tokens, too."""
    if not model.own or not answers:
        return vocab.coverage
    rule = OwnRule.of(vocab.ids, model.vocab_size, model.own)
    inside = sum(rule.num_inside(list(a.ids), list(a.mask)) for a in answers)
    return inside / max(1, sum(len(answer_ids(answer)) for answer in answers))


def make_all(
    chosen: Sequence[Group],
    groups: Sequence[Group],
    model: Model,
    sizes: Sequence[int],
    simulate: Simulate | None,
) -> tuple[list[Made], list[str]]:
    """A vocabulary for each chosen group, with notes.

    Groups without held-out answers take the size that is best for all answers together.
    """
    blind = {group.name for group in chosen if not group.heldout and len(sizes) > 1}
    everything = next((group for group in groups if group.name == ALL), None)
    if not blind or everything is None or not everything.heldout:
        return [make(group, model, sizes, simulate) for group in chosen], []
    made = {ALL: make(everything, model, sizes, simulate)}
    shared = len(made[ALL].vocab.ids)
    for group in (group for group in chosen if group.name != ALL):
        own = (shared,) if group.name in blind else sizes
        made[group.name] = make(group, model, own, simulate)
    notes = [
        f"{name}: no held-out answer is in it, so its size is that of {ALL}, {shared}; "
        "distill more prompts of this kind, or give --size"
        for name in sorted(blind)
    ]
    return [made[group.name] for group in chosen], notes


def check_counts(counts: Counts, vocab_size: int) -> None:
    """DataError if an answer holds tokens that the model does not have."""
    if counts and max(counts) >= vocab_size:
        raise DataError(
            f"the answers hold token {max(counts)}; the model has tokens 0 to {vocab_size - 1}. "
            f"They were written by another model: make the data set again."
        )
