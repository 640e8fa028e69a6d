"""What a draft vocabulary would bring: acceptance by simulation, speed by rounds of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.backends.options import Weights
from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record, spread
from headstart.models.build import has_head
from headstart.predict.head_speed import open_scorer
from headstart.predict.options import PredictionOptions
from headstart.simulate.cost import best, predict
from headstart.simulate.plan import make_plan
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.making import Prediction, Simulate

_MAX_ANSWERS = 128  # held-out answers that each size is tried on


def predictor_of(
    checkpoint: Checkpoint, head: Path | None, device: str, dtype: str, bandwidth: float | None,
    weights: Weights, sizes: Sequence[int], heldout: Sequence[Record], *, own: int = 0,
) -> Simulate | None:  # fmt: skip
    """Predicts acceptance length and speed of a vocabulary of one of these sizes.

    None where there is no head for it.
    """
    if not has_head(checkpoint, head):
        return None
    prompts = PromptReader(checkpoint)
    options = PredictionOptions(
        head=head, bandwidth=bandwidth, weights=weights, device=device, dtype=dtype
    )
    some = spread(list(heldout), _MAX_ANSWERS)
    lists: dict[int | None, Sequence[int]] = {size: _frequent(some, size) for size in sizes}
    costs, scorer, _ = open_scorer(
        checkpoint, some, make_plan(some, None, "match"), options, prompts, lists
    )

    def simulate(vocab: DraftVocab, answers: Any) -> Prediction:
        records = spread(list(answers), _MAX_ANSWERS)
        plan = make_plan(records, None, "match")
        found = scorer.score(
            records, plan, vocabs={vocab.name: lambda record: vocab}, end_ids=prompts.end_ids,
            own=own,
        )[vocab.name]  # fmt: skip
        timed = costs.of(scorer.model, len(vocab.ids))
        fastest = best(predict(found.overall.lengths, timed))
        return Prediction(fastest.acceptance_length, fastest.speed_up, fastest.drafts)

    return simulate


def _frequent(records: Sequence[Record], size: int) -> list[int]:
    """So many tokens, ascending, those that answers have most often: a vocabulary to be timed."""
    counts = Counter(token for record in records for token in record.ids[record.mask].tolist())
    ids = [token for token, _ in counts.most_common(size)]
    others = (token for token in range(2 * size) if token not in counts)
    return sorted([*ids, *islice(others, size - len(ids))])
