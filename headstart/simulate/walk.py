"""Rounds as the engine goes: from the first answer token, by what was accepted plus one."""

from __future__ import annotations

from headstart.sampling.acceptance import Acceptance
from headstart.simulate.matches import Matches


def walk(matches: Matches, num_drafts: int) -> Acceptance:
    """The counters of decoding this answer with K = `num_drafts`, as the engine counts them.

    A round drafts no more than the answer has room for, less the token that it gives anyway; an
    end token ends the walk, and what was drafted behind it counts as drafted.
    """
    answer, leading = matches.answer, matches.num_leading.tolist()
    counters, newest = Acceptance(), 0
    while newest < answer.num_tokens - 1:
        room = answer.limit - (newest + 1) - 1
        drafts = max(0, min(num_drafts, room))
        accepted = min(leading[newest], drafts)
        counters.observe(drafts, accepted)
        newest += accepted + 1
    return counters


def every_row(matches: Matches) -> Acceptance:
    """Counters as if a round began at every token: for row averages."""
    leading, depths = matches.num_leading, matches.is_match.shape[-1]
    rows = len(leading)
    accepted = [int((leading >= depth).sum()) for depth in range(1, depths + 1)]
    return Acceptance(rows, [rows] * depths, accepted, [rows, *accepted][:depths])
