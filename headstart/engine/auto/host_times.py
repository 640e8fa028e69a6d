"""What rounds take that the host drives: whole steps, timed in turns with each other.

All engines that are compared have the same prompts at a time. Rounds without drafts, which all
others are compared with, come between those again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from headstart.data.prompt_reader import PromptReader
from headstart.engine.auto.blank_passes import BlankPasses
from headstart.engine.auto.context_times import RealRound, limited, time_context
from headstart.engine.auto.costs import Curve, curve_at, level
from headstart.engine.auto.timed_rounds import Cell, HostTimer, Serving, TimedRound
from headstart.engine.core import EngineCore
from headstart.engine.options import VERIFIED, Speculate
from headstart.sampling.params import DraftFrom

_SECONDS = 10.0  # that rounds of one draft vocabulary are timed for,
_TURNS = (5, 40)  # in at least and at most so many turns;
_MOST_SECONDS = 60.0  # where the least take longer: visits are shorter then,
_FEW_TURNS = 2  # and turns fewer
_EXTREME = 0.1  # share of the quickest and of the slowest rounds that does not count
_NO_DRAFTS = Cell(0)  # rounds of an engine that drafts nothing,
_NO_DRAFTS_EVERY = 8  # in front of so many others
ENGINES = 3  # that are timed in turns at most, each with requests of its own


@dataclass(frozen=True)
class Deciding:
    """Seconds that choosing drafts takes of a round, and learning from what became of them."""

    usual: float
    copying: float  # in a round in which something could be copied


@dataclass(frozen=True)
class SourceTimes:
    """Rounds of an engine whose drafts cost nothing, by drafts, and what `auto` knows of them."""

    rounds: Curve
    verify: Curve  # share of such a round: the trunk's pass and what was chosen of it,
    besides: Curve  # and what is no pass of trunk or head
    deciding: Deciding
    profiled: Curve  # seconds that the engine takes `verify` for before its first round


@dataclass(frozen=True)
class HostTimes:
    """Rounds that the host drives.

    By where `auto` drafts from: "head" and "auto" (copies, too) of an engine that keeps its head
    ready, "context" of one without.
    """

    sources: Mapping[DraftFrom, SourceTimes]
    context: float = 0.0  # tokens of all requests in such a round,
    per_token: Curve = ()  # and what each one more adds, by drafts of each request

    def added(self, drafts: float, context: float) -> float:
        """Seconds that a round of so many tokens takes more than those that were timed."""
        if not self.per_token:
            return 0.0
        most, _ = self.per_token[-1]  # `limited` knows of no more than these
        return curve_at(self.per_token, min(drafts, most)) * (context - self.context)


def time_rounds(
    core: EngineCore, prompts: PromptReader, serving: Serving, vocabs: Sequence[str | None],
    progress: Callable[[int], None],
) -> tuple[dict[str | None, tuple[float, ...]], HostTimes]:  # fmt: skip
    """Seconds by K, for each draft vocabulary, and of what `auto` and copies take beside.

    K = 0 is that of an engine without a head. The last vocabulary is the one that `auto` has.
    Of rounds with the mean context of all that were timed.
    """
    has_head = core.drafter is not None
    kinds: list[Speculate] = ["auto", 0, "context"] if has_head else [0, "context"]
    timers = {kind: HostTimer(core.beside(kind), prompts, serving) for kind in kinds}
    counts = _copied_counts(core, serving)
    per_token = time_context(core, serving, counts)
    every_k = range(1, serving.max_drafts + 1)
    fixed = [Cell("auto", k, name) for name in vocabs for k in every_k if has_head]
    copied = {
        kind: {k: Cell(kind, k, draft_from="context") for k in counts}
        for kind in kinds if kind != 0
    }  # fmt: skip
    chosen: dict[DraftFrom, Cell] = {"context": Cell("context", "auto", draft_from="context")}
    if has_head:
        chosen["head"] = Cell("auto", "auto", vocabs[-1], draft_from="head")
        chosen["auto"] = Cell("auto", "auto", vocabs[-1], draft_from="auto")
    cells = [*fixed, *(cell for own in copied.values() for cell in own.values()), *chosen.values()]
    rounds = _timed(timers, cells, len(vocabs), progress)
    context = fmean(one.context for own in rounds.values() for one in own)
    real = {
        cell: RealRound(
            cell.drafts, _usual([one.seconds for one in own]), fmean(one.context for one in own)
        )
        for cell, own in rounds.items() if cell.drafts != "auto"
    }  # fmt: skip
    times = HostTimes({}, context, limited(per_token, real.values(), context))
    seconds = {c: own.seconds - times.added(own.drafts, own.context) for c, own in real.items()}
    sources: dict[DraftFrom, SourceTimes] = {}
    for source, cell in chosen.items():
        given = copied[cell.speculate]
        sources[source] = SourceTimes(
            level([(k, seconds[own]) for k, own in given.items()]),
            tuple((k, _share(rounds[own], "verify")) for k, own in given.items()),
            tuple((k, _share(rounds[own], "besides")) for k, own in given.items()),
            _deciding(rounds[cell], rounds[given[0]]),
            _profiled(timers[cell.speculate], serving, counts),
        )
    ks = every_k if has_head else ()
    by_k = {
        name: (seconds[_NO_DRAFTS], *(seconds[Cell("auto", k, name)] for k in ks))
        for name in vocabs
    }
    return by_k, replace(times, sources=sources)


def _share(rounds: Sequence[TimedRound], part: str) -> float:
    """Of a part in all of these."""
    return fmean(getattr(one, part) for one in rounds) / fmean(one.seconds for one in rounds)


def _profiled(timer: HostTimer, serving: Serving, counts: Sequence[int]) -> Curve:
    """Verifications by drafts, as that engine timed them at its start."""
    policy, requests = timer.core.policy, serving.requests
    assert policy is not None, "what drafts has a policy"
    table = policy.profiled(is_greedy=serving.params.is_greedy)
    return tuple((k, table.verify_seconds(requests, requests * (k + 1))) for k in counts)


def _timed(
    timers: Mapping[Speculate, HostTimer], cells: Sequence[Cell], num_vocabs: int,
    progress: Callable[[int], None],
) -> dict[Cell, list[TimedRound]]:  # fmt: skip
    """Rounds of all cells in turns, for as long as there is time.

    Those that all others are compared with come between them again and again.
    """
    rounds: dict[Cell, list[TimedRound]] = {cell: [] for cell in (_NO_DRAFTS, *cells)}
    started, (least, most) = time.perf_counter(), _TURNS
    num_visits = len(cells) + -(-len(cells) // _NO_DRAFTS_EVERY)
    longest = _MOST_SECONDS * num_vocabs / (least * num_visits)
    for turn in range(most):
        spent = (time.perf_counter() - started) / num_vocabs
        if turn >= _FEW_TURNS and spent > (_SECONDS if turn >= least else _MOST_SECONDS):
            break
        for timer in timers.values():
            timer.begin(turn)
        for place, cell in enumerate(cells if turn % 2 else reversed(cells)):
            if place % _NO_DRAFTS_EVERY == 0:
                rounds[_NO_DRAFTS] += timers[0].rounds(_NO_DRAFTS, longest)
            rounds[cell] += timers[cell.speculate].rounds(cell, longest)
        progress(1)
    return rounds


def _deciding(chosen: Sequence[TimedRound], given: Sequence[TimedRound]) -> Deciding:
    """What rounds in which drafts are chosen take more than those in which they are given."""
    least = _usual([one.deciding for one in given])
    usual = [one.deciding for one in chosen if not one.could_copy]
    copying = [one.deciding for one in chosen if one.could_copy]
    found = (max(0.0, _usual(own) - least) for own in (usual or copying, copying or usual))
    return Deciding(*found)


def _usual(seconds: Sequence[float]) -> float:
    """The mean without extremes: rounds differ by what was accepted, and all of them count."""
    cut = int(_EXTREME * len(seconds))
    return fmean(sorted(seconds)[cut : len(seconds) - cut])


def _copied_counts(core: EngineCore, serving: Serving) -> list[int]:
    """Numbers of copied drafts whose rounds are timed, none too: as there is room for."""
    passes = BlankPasses(core.backend, core.drafter, max_rows=core.options.num_rows)
    most, states = VERIFIED[-1], core.scheduler.states
    if states is not None:
        # Each draft takes a slot of recurrent states, beside those of requests under way.
        free = states.pool.num_available - ENGINES * serving.requests
        most = max(0, min(core.options.max_drafts, free // serving.requests))
    counts = [count for count in VERIFIED if count <= most]
    return [k for k in counts if k == 0 or passes.has_room(serving.requests, k)]


def num_turns() -> int:
    """How often `progress` is called at most."""
    return _TURNS[1]
