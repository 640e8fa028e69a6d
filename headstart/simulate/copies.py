"""Rounds of an answer whose drafts are all copied from its context, from the text alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headstart.copying.drafts import MAX_COPIED, copy_after
from headstart.copying.index import TextIndex
from headstart.sampling.acceptance import Acceptance
from headstart.simulate.matches import Matches


def copied_rounds(
    prompt: Sequence[int], answer: Sequence[int], num_drafts: int, limit: int | None = None
) -> Counter[tuple[int, int]]:
    """Rounds by their numbers of drafts and of accepted drafts, with up to `num_drafts` each.

    `limit`: tokens that the answer could have had, as in serving: none is drafted beyond it.
    """
    rounds: Counter[tuple[int, int]] = Counter()
    most = len(answer) if limit is None else limit
    text, done = TextIndex([*prompt, *answer[:1]]), 1
    while done < len(answer):
        following = list(answer[done : done + MAX_COPIED + 1])
        room = min(num_drafts, most - done - 1)
        copy = copy_after(text, count=room) if room > 0 else None
        accepted = 0 if copy is None else copy.num_right(following)
        new = min(accepted + 1, len(following))
        rounds[0 if copy is None else len(copy.tokens), min(accepted, new)] += 1
        text.extend(following[:new])
        done += new
    return rounds


def copied_lengths(
    matches: Sequence[Matches], texts: dict[str, list[int]], num_drafts: int
) -> list[float]:
    """Acceptance length of copies alone over many answers, by number of drafts from 0."""
    lengths = []
    for drafts in range(num_drafts + 1):
        total = Acceptance()
        for each in matches:
            ids, answer = texts[each.answer.record_id], each.answer
            total.add(Acceptance.of(copied_rounds(
                ids[: answer.start], ids[answer.start : answer.stop], drafts
            )))  # fmt: skip
        lengths.append(total.length)
    return lengths
