"""A head's acceptance on held-out answers, and the speed that it comes to on this device.

Acceptance is simulated (`simulate/scoring.py`), on a CPU by the very backend that serves; what
rounds cost is timed with the engine; and the engine's rule says which draft vocabulary a prompt
takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from headstart.backends.base import Backend
from headstart.backends.select import check_formats, create_backend, held_as_stored, select
from headstart.backends.torch.threads import prepare
from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record, spread
from headstart.engine.auto.served_costs import BandwidthCosts, RoundTimes, ServedCosts, timed_costs
from headstart.engine.auto.timed_rounds import Serving
from headstart.engine.draft_vocabs import DraftVocabs
from headstart.engine.options import EngineOptions
from headstart.errors import HeadNotFound
from headstart.models.build import (
    LoadedModel,
    build,
    has_head,
    resolve_device,
    resolve_dtype,
)
from headstart.predict.bench_costs import bench_costs
from headstart.predict.options import PredictionOptions
from headstart.predict.plays import Plays
from headstart.simulate.answers import mean_context
from headstart.simulate.cost import best, predict
from headstart.simulate.plan import Plan, make_plan
from headstart.simulate.scoring import (
    WHOLE,
    Scored,
    Scores,
    VocabOf,
    is_served,
    score,
    score_served,
)
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.own_tokens import OwnRule

_LEAST_ANSWER = 64  # tokens of an answer whose rounds are timed
_MOST_PROMPTS = 32
LEAST_LEN = 2048  # tokens that there is K/V memory for while rounds are timed


@dataclass(frozen=True)
class Scorer:
    """A model that scores answers: with the backend that serves, or as plain modules."""

    model: LoadedModel
    backend: Backend | None = None  # None: plain modules

    @property
    def name(self) -> str:
        """How it computes, in words."""
        if self.backend is None:
            return f"plain modules, {str(self.model.dtype).removeprefix('torch.')}"
        weights = self.backend.options.weights
        kind = str(self.model.dtype).removeprefix("torch.") if weights == "as-dtype" else weights
        return f"backend {self.backend.name}, {kind}"

    def score(
        self, records: Sequence[Record], plan: Plan, *, max_drafts: int = 8,
        vocabs: dict[str, VocabOf] | None = None, end_ids: frozenset[int] = frozenset(),
        own: int = 0, progress: Callable[[int], None] = lambda num_tokens: None,
    ) -> dict[str, Scores]:  # fmt: skip
        if self.backend is not None and is_served(self.backend, plan):
            return score_served(
                self.backend, records, plan, max_drafts=max_drafts, vocabs=vocabs,
                end_ids=end_ids, own=own, progress=progress,
            )  # fmt: skip
        return score(
            self.model, records, plan, max_drafts=max_drafts, vocabs=vocabs, end_ids=end_ids,
            own=own, progress=progress,
        )  # fmt: skip


@dataclass(frozen=True)
class HeadPrediction:
    """Costs that were taken and a model that is loaded; `run` scores the answers."""

    records: Sequence[Record]
    options: PredictionOptions
    plan: Plan
    scorer: Scorer
    costs: ServedCosts
    maps: DraftVocabs
    prompts: PromptReader
    notes: list[str]  # what was decided at start, each thing once

    def run(self, progress: Callable[[int], None] = lambda num_tokens: None) -> dict[str, Any]:
        """The method and one result for each vocabulary, for JSON; `progress` gets tokens."""
        ways: dict[str, VocabOf] = {WHOLE: lambda record: None}
        if self.options.vocab is not None:
            ways[self.options.vocab.name] = self._map_of
        found = self.scorer.score(
            self.records, self.plan, max_drafts=self.options.max_drafts, vocabs=ways,
            end_ids=self.prompts.end_ids, own=self.options.own, progress=progress,
        )  # fmt: skip
        return {**self._method(), "results": [self._result(*each) for each in found.items()]}

    def _map_of(self, record: Record) -> DraftVocab | None:
        """The map that the engine takes for a record's prompt."""
        ids = record.ids[: record.num_prompt].tolist()
        name = self.maps.choose(None, ids, ids, self.prompts)
        return None if name is None else self.maps.by_name[name]

    def _method(self) -> dict[str, Any]:
        plan, model = self.plan, self.scorer.model
        method = {
            "method": plan.method, "rule": plan.rule, "temperature": plan.params.temperature,
            "explanation": plan.reason, "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."), "costs": self.costs.origin,
            "requests": self.options.requests, "weights": self.options.weights,
            "scored_by": self.scorer.name, "copies": self._copies,
        }  # fmt: skip
        return {**method, "formula": plan.formula} if plan.method == "formula" else method

    def _result(self, way: str, scores: Scores) -> dict[str, Any]:
        size = None if way == WHOLE else largest_map(self.maps)
        result = {"vocabulary": way, **scores.as_json()}
        if way != WHOLE:
            result["coverage"] = coverage(
                self.records, self._map_of, self.options.own, self.scorer.model.config.vocab
            )
            result["own"] = self.options.own
        played = self._played(scores.overall, size)
        for name, part in scores.parts.items():
            result["by_category"][name] |= self._speeds(part, size, played)
        return {**result, **self._speeds(scores.overall, size, played)}

    def _played(self, scored: Scored, size: int | None) -> Plays | None:
        """All answers by `auto`; None where they are not replayed."""
        if not scored.matches:
            return None
        costs = self.costs.of(self.scorer.model, size)
        most = len(scored.lengths) - 1
        return Plays.of(scored.matches, self._texts, costs, self.options, most)

    @property
    def _copies(self) -> str:
        """Whether drafts from the context are predicted, in words."""
        if self.plan.method == "formula":
            return "not predicted: rounds are played only where answers are replayed"
        costs = self.costs.of(self.scorer.model, None)
        if isinstance(costs, RoundTimes) and costs.host is not None:
            return f"played in rounds that were timed as whole steps{self.options.answers_copied}"
        if isinstance(costs, RoundTimes) and costs.captured is not None:
            by = "in captured rounds, by what `auto` timed; not checked on a GPU yet"
            return f"played {by}{self.options.answers_copied}"
        return "not predicted: such costs do not say what rows of copied drafts take"

    def _speeds(self, scored: Scored, size: int | None, played: Plays | None) -> dict[str, Any]:
        """The speed of every K, of the best one, and of `auto`."""
        costs, requests = self.costs.of(self.scorer.model, size), self.options.requests
        if isinstance(costs, RoundTimes):
            costs = costs.at(mean_context([own.answer for own in scored.matches]))
        speeds = predict(scored.lengths, costs, requests, intervals=scored.intervals)
        found = {"speed": [speed.as_json() for speed in speeds], "best_drafts": best(speeds).drafts}
        return found if played is None else {**found, **played.speeds(scored.matches)}

    @cached_property
    def _texts(self) -> dict[str, list[int]]:
        return {record.id: record.ids.tolist() for record in self.records}


def open_prediction(
    checkpoint: Checkpoint, records: Sequence[Record], options: PredictionOptions, *,
    timing: Callable[[int], None] = lambda turns: None,
) -> HeadPrediction:  # fmt: skip
    """Take costs and load the model; HeadNotFound where there is no head to score.

    `timing` gets the turns in which rounds were timed.
    """
    plan = make_plan(records, options.temperature, options.rule)
    maps = DraftVocabs.open(options.vocab, checkpoint)
    if not has_head(checkpoint, options.head):
        raise HeadNotFound(
            f"{checkpoint.folder} has no head to score. Give one with --head, or make one with "
            "`headstart graft`."
        )
    prompts = PromptReader(checkpoint)
    lists: dict[int | None, Sequence[int]] = {None: ()}
    lists |= {len(each.ids): each.ids for each in maps.by_name.values()}
    timed = {size: lists[size] for size in (None, largest_map(maps))}
    costs, scorer, notes = open_scorer(
        checkpoint, records, plan, options, prompts, timed, timing=timing
    )
    return HeadPrediction(records, options, plan, scorer, costs, maps, prompts, notes)


def open_scorer(
    checkpoint: Checkpoint, records: Sequence[Record], plan: Plan, options: PredictionOptions,
    prompts: PromptReader, lists: Mapping[int | None, Sequence[int]], *,
    timing: Callable[[int], None] = lambda turns: None,
) -> tuple[ServedCosts, Scorer, list[str]]:  # fmt: skip
    """Costs for draft vocabularies, by their size, what scores answers, and notes.

    The model is loaded as an engine holds it. Where plain modules score, which an engine's are not
    any more, it is loaded once more.
    """
    place = resolve_device(options.device)
    own = EngineOptions(weights=options.weights).resolved(place.type).backend
    check_formats(place, resolve_dtype(options.dtype, place), own)
    costs: ServedCosts | None = None
    if options.bandwidth is not None:
        costs = BandwidthCosts(options.bandwidth, options.weights)
    elif options.bench is not None:
        costs = bench_costs(options.bench, options.bench_name, options.requests)
    load = partial(build, checkpoint, options.head, device=options.device, dtype=options.dtype)
    served = load(holds=partial(held_as_stored, options=own))
    notes = list(served.notes)
    backend = None
    if costs is None or select(served, own).name == "numba":
        serving = serving_of(records, plan, options)
        longest = max(LEAST_LEN, serving.num_tokens + 1, *(len(r.ids) for r in records))
        backend = create_backend(replace(served, max_len=min(served.max_len, longest)), own)
        if costs is None:
            costs = timed_costs(backend, prompts, lists, serving, progress=timing)
        notes += backend.notes
        if is_served(backend, plan):
            return costs, Scorer(backend.model, backend), list(dict.fromkeys(notes))
    assert costs is not None
    del served, backend
    model = load()
    notes += prepare(model, chooses_threads=options.is_timed)
    return costs, Scorer(model), list(dict.fromkeys((*notes, *model.notes)))


def serving_of(records: Sequence[Record], plan: Plan, options: PredictionOptions) -> Serving:
    """What will be served, as the answers show it."""
    some = spread(records, _MOST_PROMPTS)
    random.Random(0).shuffle(some)  # the first few are of all kinds
    prompts = [record.ids[: record.num_prompt].tolist() for record in some]
    mean = sum(int(record.mask.sum()) for record in records) // len(records)
    # Engines that are timed in turns may have more rows in a step.
    own = EngineOptions(speculate=options.max_drafts, max_running_requests=options.requests)
    return Serving(
        replace(plan.params, acceptance=plan.rule), [ids for ids in prompts if ids] or [[0]],
        max(_LEAST_ANSWER, mean), options.requests, options.max_drafts,
    ).outlasting(own.num_rows)  # fmt: skip


def largest_map(maps: DraftVocabs) -> int | None:
    """Tokens of the largest map, which is the one whose rounds are timed; None without maps."""
    return max((len(each.ids) for each in maps.by_name.values()), default=None)


def coverage(
    records: Sequence[Record], vocab_of: VocabOf, own: int = 0, vocab_size: int = 0
) -> float:
    """Share of answer tokens that drafts can be at all, with so many own tokens of texts."""
    inside = total = 0
    rules: dict[str, OwnRule] = {}
    for record in records:
        vocab, answer = vocab_of(record), record.ids[record.mask].tolist()
        total += len(answer)
        if vocab is None:
            inside += len(answer)
        elif own:
            if vocab.name not in rules:
                rules[vocab.name] = OwnRule.of(vocab.ids, vocab_size, own)
            inside += rules[vocab.name].num_inside(record.ids.tolist(), record.mask.tolist())
        else:
            known = set(vocab.ids)
            inside += sum(token in known for token in answer)
    return inside / max(1, total)
