"""What copies from the context bring a model without a head, on held-out answers.

Which copies are right follows from the answers' own tokens; what rounds cost is timed with the
engine where its host drives them, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headstart.backends.select import check_formats, create_backend, held_as_stored
from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record
from headstart.engine.auto.served_costs import RoundTimes, timed_costs
from headstart.engine.options import EngineOptions
from headstart.models.build import build, resolve_device, resolve_dtype
from headstart.models.config_reader import model_config
from headstart.predict.head_speed import LEAST_LEN, serving_of
from headstart.predict.host_speed import host_speed
from headstart.predict.options import PredictionOptions
from headstart.simulate.answers import answers_of
from headstart.simulate.copies import ReplayedCopies
from headstart.simulate.matches import Matches, without_head
from headstart.simulate.plan import make_plan
from headstart.simulate.rates import Size

_NOT_TIMED = "only rounds that are timed on a CPU say what they cost"


@dataclass(frozen=True)
class ContextPrediction:
    """Answers, and costs of rounds where they were taken."""

    records: Sequence[Record]
    options: PredictionOptions
    matches: Sequence[Matches]
    times: RoundTimes | None
    origin: str  # of the costs, in words
    notes: list[str]

    def run(self, progress: Callable[[int], None] = lambda num_tokens: None) -> dict[str, Any]:
        """Lengths and speeds of copies alone, of all answers and by category, for JSON."""
        texts = {record.id: record.ids.tolist() for record in self.records}
        played, requests = None, self.options.requests
        answers = self.options.draft_from_answers
        if self.times is not None:
            played = host_speed(self.matches, texts, self.times, 0, "context", answers)
        copies = ReplayedCopies.of(self.matches, texts, self.options.max_drafts, answers)
        progress(sum(map(len, texts.values())))

        def of(own: Sequence[Matches]) -> dict[str, Any]:
            speed = None if played is None else played.of(own)
            return {
                **vars(Size.of([each.answer for each in own])),
                "context_acceptance_length": copies.lengths(own),
                "context_speed_up": None if speed is None else speed.speed_up,
                "context_copied_share": None if speed is None else speed.copied_share,
            }

        names = dict.fromkeys(each.answer.category for each in self.matches)
        parts = {n: [m for m in self.matches if m.answer.category == n] for n in names}
        return {
            "explanation": "no head: drafts that are copied from the context alone, played over "
            f"the answers' own tokens{self.options.answers_copied}",
            "costs": self.origin, "requests": requests, "weights": self.options.weights,
            "context": {
                "overall": of(self.matches),
                "by_category": {n: of(own) for n, own in parts.items() if len(parts) > 1},
            },
            "results": [],
        }  # fmt: skip


def open_context_prediction(
    checkpoint: Checkpoint, records: Sequence[Record], options: PredictionOptions, *,
    timing: Callable[[int], None] = lambda turns: None,
) -> ContextPrediction:  # fmt: skip
    """Take costs where rounds can be timed; `timing` gets the turns."""
    plan = make_plan(records, options.temperature, "match")
    prompts, times, origin, notes = PromptReader(checkpoint), None, f"none: {_NOT_TIMED}", []
    max_len = model_config(checkpoint.config.fields).max_positions
    place = resolve_device(options.device)
    if options.is_timed and place.type == "cpu":
        own = EngineOptions(weights=options.weights).resolved(place.type).backend
        check_formats(place, resolve_dtype(options.dtype, place), own)
        model = build(
            checkpoint, device=options.device, dtype=options.dtype, with_head=False,
            holds=partial(held_as_stored, options=own),
        )  # fmt: skip
        serving = replace(serving_of(records, plan, options), max_drafts=0)
        longest = max(LEAST_LEN, serving.num_tokens + 1, *(len(r.ids) for r in records))
        backend = create_backend(replace(model, max_len=min(model.max_len, longest)), own)
        costs = timed_costs(backend, prompts, {None: ()}, serving, progress=timing)
        times, origin, max_len = costs.times[None], costs.origin, model.max_len
        notes = [*model.notes, *backend.notes]
    answers = [
        answer
        for record in records
        for answer in answers_of(
            record, max_len=max_len, params=plan.params, end_ids=prompts.end_ids
        )
    ]
    matches = [without_head(answer) for answer in answers]
    return ContextPrediction(records, options, matches, times, origin, list(dict.fromkeys(notes)))
