"""What our simulator predicts of answers that our engine gave, beside what the engine counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.data.records import Record
from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.params import SamplingParams
from headstart.simulate.plan import make_plan
from headstart.simulate.rates import Rates
from headstart.simulate.scoring import score
from headstart.vocab.draft_vocab import DraftVocab

_RULES = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop_token_ids")


def simulated(
    engine: Engine,
    results: Sequence[Result],
    params: SamplingParams,
    depth: int,
    vocab: DraftVocab,
) -> tuple[Acceptance, Acceptance]:
    """Counted and predicted, over all answers."""
    counted, predicted = Acceptance(), Acceptance()
    for result in results:
        counted.add(result.outputs[0].stats.acceptance)
    known = [_record(result, params, number) for number, result in enumerate(results)]
    plan = make_plan(known, None, "match")
    ways = {vocab.name: lambda record: vocab}
    found = score(engine.model, known, plan, max_drafts=depth, vocabs=ways)[vocab.name]
    for part in found.parts.values():
        assert isinstance(part.found, Rates)
        predicted.add(part.found.walked[depth])
    return counted, predicted


def _record(result: Result, params: SamplingParams, number: int) -> Record:
    output = result.outputs[0]
    ids = np.array([*result.prompt_token_ids, *output.token_ids], np.int32)
    num_prompt = len(result.prompt_token_ids)
    fields: dict[str, Any] = {
        "id": f"r{number}", "prompt_id": f"p{number}", "category": f"r{number}", "turn": 0,
        "sample": 0, "ids": ids, "mask": np.arange(len(ids)) >= num_prompt,
        "seed": output.stats.seed, "sampling": {name: getattr(params, name) for name in _RULES},
        "finish_reason": output.finish_reason, "exact_ids": True, "num_prompt": num_prompt,
    }  # fmt: skip
    return Record(**fields)
