"""Answers inside documents: where each stands, how it was sampled, and batches of them.

Answer tokens a_0, a_1, ... stand at positions start, start + 1, ... of their document. a_0 comes
from reading the prompt. The round whose newest token is a_i begins at row start - 1 + i, and its
draft of depth k guesses a_(i+k).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headstart.errors import DataError, some
from headstart.models.documents import Documents
from headstart.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headstart.data.records import Record

GREEDY = SamplingParams(temperature=0)
NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Tokens [start, stop) of one document."""

    record_id: str
    prompt_id: str
    category: str = ""
    document: int = 0  # in its batch
    start: int  # at least 1
    stop: int
    limit: int = NO_LIMIT  # how many tokens it could have had: drafts beyond are not made
    params: SamplingParams = GREEDY
    seed: int = 0  # of the engine's noise: Request.seed
    end_ids: frozenset[int] = frozenset()

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def mean_context(answers: Sequence[Answer]) -> float | None:
    """Tokens before a token of these answers; None without any."""
    tokens = sum(own.num_tokens for own in answers)
    before = sum(own.num_tokens * (own.start + own.num_tokens / 2) for own in answers)
    return before / tokens if tokens else None


@dataclass(frozen=True)
class Batch:
    """Documents one after another, with the trunk's states of their rows."""

    states: torch.Tensor  # [T, D], of the kind that the head's layout names
    ids: torch.Tensor  # [T]
    documents: Documents
    answers: Sequence[Answer]

    def on(self, device: str | torch.device) -> Batch:
        return replace(self, states=self.states.to(device), ids=self.ids.to(device))


def params_of(sampling: Mapping[str, Any], temperature: float | None = None) -> SamplingParams:
    """How a record was sampled (greedily, if it does not say), or would be at another temperature.

    None is a setting that was left out.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    strange = set(given) - {field.name for field in fields(SamplingParams)}
    if strange:
        raise DataError(
            f"the data was sampled with {some(sorted(strange))}, which is not known here. Update "
            "Headstart, or make the data again."
        )
    given.setdefault("temperature", 0.0)
    if temperature is not None:
        given["temperature"] = temperature
    return SamplingParams(**{**given, "n": 1})


def answers_of(
    record: Record,
    *,
    document: int = 0,
    max_len: int,
    params: SamplingParams,
    end_ids: frozenset[int] = frozenset(),
) -> list[Answer]:
    """Every masked span of a record; usually there is one."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], record.mask.astype(np.int8), [0]))))
    spans = [(max(1, int(a)), int(b)) for a, b in edges.reshape(-1, 2) if b > 1]
    is_asked = len(spans) == 1 and bool(record.sampling)
    result = []
    for start, stop in spans:
        # The limit of an imported conversation is unknown.
        limit = min(params.max_tokens or NO_LIMIT, max_len - start) if is_asked else NO_LIMIT
        if record.max_tokens is not None:  # the engine's own limits may have been narrower
            limit = min(limit, record.max_tokens)
        if record.finish_reason == "length":
            limit = stop - start
        result.append(
            Answer(
                record_id=record.id, prompt_id=record.prompt_id, category=record.category,
                document=document, start=start, stop=stop, limit=limit, params=params,
                seed=record.seed or 0, end_ids=end_ids | frozenset(params.stop_token_ids),
            )
        )  # fmt: skip
    return result


def grouped(records: Sequence[Record], max_rows: int) -> Iterator[list[Record]]:
    """Records in batches of at most so many tokens; a longer record is a batch of its own.

    Short ones together, so that little is computed at a time without reason.
    """
    batch: list[Record] = []
    rows = 0
    for record in sorted(records, key=lambda record: len(record.ids)):
        if batch and rows + len(record.ids) > max_rows:
            yield batch
            batch, rows = [], 0
        batch.append(record)
        rows += len(record.ids)
    if batch:
        yield batch
