"""What a token of context adds to a round, by drafts: timed with blank requests.

Passes with short and with long contexts take turns, so that a machine that is slow for a while is
slow for both. What comes of it is used far beyond these contexts; `limited` holds it against rounds
of real requests, so that no round is predicted to take hardly any time, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from headstart.engine.auto.blank_passes import BlankPasses
from headstart.engine.auto.costs import Curve
from headstart.engine.auto.timed_rounds import Serving
from headstart.engine.core import EngineCore

_NEAR = 32  # tokens of a request,
LONGEST = 1024  # and so many, between which what one of them adds is taken:
_FAR = (LONGEST, 512, 256, 128)  # the most of these that there is memory for
_MOST_OF_ROUND = 0.9  # that context may take of any round: weights are read and choices made, too


class RealRound(NamedTuple):
    """What rounds of real requests took, on average."""

    drafts: int  # of each request
    seconds: float
    context: float  # tokens of all requests


def time_context(core: EngineCore, serving: Serving, counts: Sequence[int]) -> Curve:
    """Seconds by drafts, before the first real request; nothing without memory for contexts."""

    def passes(context: int) -> BlankPasses:
        rows = core.options.num_rows
        return BlankPasses(core.backend, core.drafter, max_rows=rows, context=context)

    near, requests = passes(_NEAR), serving.requests
    far = near
    for longer in map(passes, _FAR):
        if all(longer.has_room(requests, drafts) for drafts in counts):
            far = longer
            break
    tokens = requests * (far.context - near.context)
    if not counts or tokens <= 0:
        return ()
    params = replace(serving.params, acceptance="match")  # what another rule takes is no context
    with torch.inference_mode():
        seconds = near.seconds(
            [own.verification(requests, k, params) for k in counts for own in (near, far)]
        )
    pairs = zip(counts, seconds[::2], seconds[1::2], strict=True)
    return tuple((k, max(0.0, long - short) / tokens) for k, short, long in pairs)


def limited(per_token: Curve, rounds: Iterable[RealRound], context: float) -> Curve:
    """The same, where no round takes less than a tenth of what was timed, however short its text.

    `context`: tokens of all requests, to which the rounds' seconds will be brought.
    """
    known, found, before = list(rounds), list[tuple[int, float]](), -1
    for drafts, seconds in per_token:
        # More drafts count, too: a round is taken to cost no more than one with more of them.
        each = [own.seconds / max(own.context, context) for own in known if own.drafts > before]
        found.append((drafts, min([seconds, *(_MOST_OF_ROUND * own for own in each)])))
        before = drafts
    return tuple(found)
