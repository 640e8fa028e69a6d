"""Rounds of answers whose drafts are all copied, from the text alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headstart.copying.answers import AnswerStore
from headstart.copying.drafts import MAX_COPIED, copy_after
from headstart.copying.index import TextIndex
from headstart.sampling.acceptance import Acceptance
from headstart.simulate.matches import Matches

Rounds = Counter[tuple[int, int]]  # by their numbers of drafts and of accepted drafts


def copied_rounds(
    prompt: Sequence[int], answer: Sequence[int], num_drafts: int, limit: int | None = None,
    store: AnswerStore | None = None,
) -> Rounds:  # fmt: skip
    """Rounds with up to `num_drafts` each.

    `limit`: tokens that the answer could have had, as in serving: none is drafted beyond it.
    `store`: earlier answers that are copied from, too; this one is added to them.
    """
    rounds: Rounds = Counter()
    most = len(answer) if limit is None else limit
    text, done = TextIndex([*prompt, *answer[:1]]), 1
    while done < len(answer):
        following = list(answer[done : done + MAX_COPIED + 1])
        room = min(num_drafts, most - done - 1)
        copy = copy_after(text, answers=store, count=room) if room > 0 else None
        accepted = 0 if copy is None else copy.num_right(following)
        new = min(accepted + 1, len(following))
        rounds[0 if copy is None else len(copy.tokens), min(accepted, new)] += 1
        text.extend(following[:new])
        done += new
    if store is not None:
        store.add(b"", answer)
    return rounds


@dataclass(frozen=True)
class ReplayedCopies:
    """Rounds of every answer by number of drafts from 0, each answer by itself."""

    rounds: Mapping[tuple[str, int], Sequence[Rounds]]  # by record, and where it begins there

    @classmethod
    def of(
        cls, matches: Sequence[Matches], texts: Mapping[str, list[int]], num_drafts: int,
        from_answers: int = 0,
    ) -> ReplayedCopies:  # fmt: skip
        """One answer after another, which may copy from so many of those before it."""
        stores = [
            AnswerStore(from_answers) if from_answers else None for _ in range(num_drafts + 1)
        ]
        rounds = {}
        for answer in (each.answer for each in matches):
            ids = texts[answer.record_id]
            prompt, own = ids[: answer.start], ids[answer.start : answer.stop]
            rounds[answer.record_id, answer.start] = [
                copied_rounds(prompt, own, drafts, store=store)
                for drafts, store in enumerate(stores)
            ]
        return cls(rounds)

    def lengths(self, matches: Sequence[Matches]) -> list[float]:
        """Acceptance length of these answers, by number of drafts."""
        each = [self.rounds[own.answer.record_id, own.answer.start] for own in matches]
        return [Acceptance.of(sum(own, Counter())).length for own in zip(*each, strict=True)]
