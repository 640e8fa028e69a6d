"""What the tests of engines that copy share: prompts with much to copy, and rounds that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headstart.copying.drafts import Copy
from headstart.engine.auto.copies import PlannedRound
from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams
from support.engine_runs import VOCAB, greedy, ids_of, make_prompts, run, start

BEGINNINGS = make_prompts()[:6]


class Parity:
    """A toy grammar: odd and even ids take turns, and after `limit` tokens nothing is allowed."""

    def __init__(self, limit: int = 1000, state: int = 0):
        self.limit, self.state = limit, state

    def allowed(self) -> torch.Tensor:
        ids = torch.arange(VOCAB)
        return (ids % 2 == self.state % 2) & (self.state < self.limit)

    def accept(self, token: int) -> bool:
        if token % 2 != self.state % 2 or self.state >= self.limit:
            return False
        self.state += 1
        return True

    def fork(self) -> Parity:
        return Parity(self.limit, self.state)


def tokens_by_origin(results: Sequence[Result]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for one in (output for result in results for output in result.outputs):
        for token, origin in zip(one.token_ids, one.origins, strict=True):
            found.setdefault(origin, set()).add(token)
    return found


def origins_of(results: Sequence[Result]) -> set[str]:
    return {*tokens_by_origin(results)}


def assert_copies_are_alive(results: Sequence[Result]) -> None:
    """Some copied drafts were right and some were wrong: otherwise nothing is shown."""
    assert {"copied", "recovered", "bonus"} <= origins_of(results)


@cache
def prompts_of(folder: Path, *, by_parity: bool = False) -> list[list[int]]:
    """What the model would write, changed here and there, and the same beginning again.

    So there is much to copy, and some of it is wrong. `by_parity`: what it would write beside that
    grammar.
    """
    grammar = Parity() if by_parity else None
    plain = start(folder, speculate=0)
    said = ids_of(run(plain, BEGINNINGS, greedy(60), grammar=grammar))
    changed = [[(t + 1) % VOCAB if i % 7 == 6 else t for i, t in enumerate(own)] for own in said]
    return [[*begin, *own, *begin] for begin, own in zip(BEGINNINGS, changed, strict=True)]


def copied(params: SamplingParams, drafts: int = 16) -> SamplingParams:
    return replace(params, draft_from="context", speculate=drafts)


def take_all_copies(engine: Engine) -> None:
    """Whatever rounds cost: copies where there are any, after the head's drafts if they agree."""
    assert engine.policy is not None
    policy, rounds = engine.policy, {"count": 0}
    drafts = 2 if engine.model.head is not None else 0

    def plan(
        requests: Sequence[Request], num_running: int, copies: dict[Request, Copy]
    ) -> PlannedRound:
        by_head = [request for request in requests if request.params.draft_from != "context"]
        head = dict.fromkeys(requests, 0)
        head |= {request: min(drafts, policy.room(request)) for request in by_head}
        rounds["count"] += 1
        instead = {r: len(copy.tokens) for r, copy in copies.items() if rounds["count"] % 2}
        return PlannedRound({r: 0 if r in instead else k for r, k in head.items()}, instead, 0.0)

    policy.plan = plan


def with_both(folder: Path, **settings: Any) -> Engine:
    """An engine whose head and copies take turns."""
    engine = start(folder, speculate="auto", **settings)
    take_all_copies(engine)
    return engine
