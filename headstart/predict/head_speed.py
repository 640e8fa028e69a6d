"""A head's acceptance on held-out answers, and the speed that it comes to on this device.

Acceptance is simulated (`simulate/scoring.py`); what rounds cost is timed with the engine, and the
engine's rule says which draft vocabulary a prompt takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headstart.backends.torch.threads import prepare
from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record
from headstart.engine.auto.single_request import SingleRequestCosts, single_request_costs
from headstart.engine.draft_vocabs import DraftVocabs
from headstart.errors import HeadNotFound
from headstart.models.build import LoadedModel, build, has_head
from headstart.predict.options import PredictionOptions
from headstart.simulate.cost import best, predict
from headstart.simulate.plan import Plan, make_plan
from headstart.simulate.scoring import WHOLE, Scores, VocabOf, score
from headstart.vocab.draft_vocab import DraftVocab


@dataclass(frozen=True)
class HeadPrediction:
    """Costs that were taken and a model that is loaded; `run` scores the answers."""

    records: Sequence[Record]
    options: PredictionOptions
    plan: Plan
    built: LoadedModel
    costs: SingleRequestCosts
    maps: DraftVocabs
    prompts: PromptReader

    @property
    def notes(self) -> list[str]:
        """What was decided at start, each thing once."""
        return list(dict.fromkeys((*self.costs.notes, *self.built.notes)))

    def run(self, progress: Callable[[int], None] = lambda num_tokens: None) -> dict[str, Any]:
        """The method and one result for each vocabulary, for JSON; `progress` gets tokens."""
        ways: dict[str, VocabOf] = {WHOLE: lambda record: None}
        if self.options.vocab is not None:
            ways[self.options.vocab.name] = self._map_of
        found = score(
            self.built, self.records, self.plan, max_drafts=self.options.max_drafts, vocabs=ways,
            end_ids=self.prompts.end_ids, progress=progress,
        )  # fmt: skip
        return {**self._method(), "results": [self._result(*each) for each in found.items()]}

    def _map_of(self, record: Record) -> DraftVocab | None:
        """The map that the engine takes for a record's prompt."""
        ids = record.ids[: record.num_prompt].tolist()
        name = self.maps.choose(None, ids, ids, self.prompts)
        return None if name is None else self.maps.by_name[name]

    def _method(self) -> dict[str, Any]:
        plan, bandwidth = self.plan, self.options.bandwidth
        method = {
            "method": plan.method, "rule": plan.rule, "temperature": plan.params.temperature,
            "explanation": plan.reason, "device": str(self.built.device),
            "dtype": str(self.built.dtype).removeprefix("torch."),
            "costs": "measured here" if bandwidth is None else f"from {bandwidth:g} GB/s",
            "weights": self.options.weights,
        }  # fmt: skip
        return {**method, "formula": plan.formula} if plan.method == "formula" else method

    def _result(self, way: str, scores: Scores) -> dict[str, Any]:
        is_greedy = self.plan.params.is_greedy and self.plan.rule == "match"
        size = None if way == WHOLE else largest_map(self.maps)
        speeds = predict(
            scores.overall.lengths, self.costs.of(self.built, size, is_greedy=is_greedy),
            intervals=scores.overall.intervals,
        )  # fmt: skip
        result = {"vocabulary": way, **scores.as_json()}
        if way != WHOLE:
            result["coverage"] = coverage(self.records, self._map_of)
        result["speed"] = [speed.as_json() for speed in speeds]
        return {**result, "best_drafts": best(speeds).drafts}


def open_prediction(
    checkpoint: Checkpoint, records: Sequence[Record], options: PredictionOptions
) -> HeadPrediction:
    """Take costs and load the model; HeadNotFound where there is no head to score."""
    plan = make_plan(records, options.temperature, options.rule)
    maps = DraftVocabs.open(options.vocab, checkpoint)
    if not has_head(checkpoint, options.head):
        raise HeadNotFound(
            f"{checkpoint.folder} has no head to score. Give one with --head, or make one with "
            "`headstart graft`."
        )
    # Before the model is loaded as scoring wants it: an engine holds it otherwise.
    costs = single_request_costs(
        checkpoint, options.head, dict.fromkeys((None, largest_map(maps))), device=options.device,
        dtype=options.dtype, bandwidth=options.bandwidth, weights=options.weights,
    )  # fmt: skip
    built = build(checkpoint, options.head, device=options.device, dtype=options.dtype)
    notes = prepare(built, chooses_threads=options.bandwidth is None)
    built = replace(built, notes=(*built.notes, *notes))
    return HeadPrediction(records, options, plan, built, costs, maps, PromptReader(checkpoint))


def largest_map(maps: DraftVocabs) -> int | None:
    """Tokens of the largest map, which is the one whose rounds are timed; None without maps."""
    return max((len(each.ids) for each in maps.by_name.values()), default=None)


def coverage(records: Sequence[Record], vocab_of: VocabOf) -> float:
    """Share of answer tokens that drafts can be at all."""
    inside = total = 0
    for record in records:
        vocab, answer = vocab_of(record), record.ids[record.mask].tolist()
        total += len(answer)
        inside += len(answer)
        if vocab is not None:
            known = set(vocab.ids)
            inside -= sum(token not in known for token in answer)
    return inside / max(1, total)
