"""What a draft vocabulary would bring: acceptance by simulation, speed by rounds of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.backends.options import Weights
from headstart.backends.torch.threads import prepare
from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import spread
from headstart.engine.auto.single_request import single_request_costs
from headstart.models.build import build, has_head
from headstart.simulate.cost import best, predict
from headstart.simulate.plan import make_plan
from headstart.simulate.scoring import score
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.making import Prediction, Simulate

_MAX_ANSWERS = 128  # held-out answers that each size is tried on


def predictor_of(
    checkpoint: Checkpoint, head: Path | None, device: str, dtype: str, bandwidth: float | None,
    weights: Weights, sizes: Sequence[int],
) -> Simulate | None:  # fmt: skip
    """Predicts acceptance length and speed of a vocabulary of one of these sizes.

    None where there is no head for it.
    """
    if not has_head(checkpoint, head):
        return None
    # Before the model is loaded as scoring wants it: an engine holds it otherwise.
    costs = single_request_costs(
        checkpoint, head, sizes, device=device, dtype=dtype, bandwidth=bandwidth,
        weights=weights,
    )  # fmt: skip
    built = build(checkpoint, head, device=device, dtype=dtype)
    prepare(built, chooses_threads=bandwidth is None)
    end_ids = PromptReader(checkpoint).end_ids

    def simulate(vocab: DraftVocab, answers: Any) -> Prediction:
        records = spread(list(answers), _MAX_ANSWERS)
        plan = make_plan(records, None, "match")
        found = score(
            built, records, plan, vocabs={vocab.name: lambda record: vocab}, end_ids=end_ids
        )[vocab.name]  # fmt: skip
        own = costs.of(built, len(vocab.ids), is_greedy=plan.params.is_greedy)
        fastest = best(predict(found.overall.lengths, own))
        return Prediction(fastest.acceptance_length, fastest.speed_up, fastest.drafts)

    return simulate
