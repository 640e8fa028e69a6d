"""The options of a prediction; importing it does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.engine.options import MAX_DRAFTS
from headstart.errors import ConfigError
from headstart.vocab.own_tokens import check_beside, check_limit

if TYPE_CHECKING:
    from headstart.backends.options import Weights

MAX_REQUESTS = 256


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """How answers are scored and how the engine runs whose rounds are timed."""

    head: Path | None = None  # None: the model's own
    vocab: Path | None = None  # a file of draft vocabularies, scored beside the whole vocabulary
    own: int = 0  # tokens of its text that a request drafts beside one of them
    temperature: float | None = None  # None: that of the answers
    rule: str = "match"
    max_drafts: int = 8
    draft_from_answers: int = 0  # answers before it that each may copy from
    requests: int = 1  # served at once
    bandwidth: float | None = None  # GB/s: costs from sizes
    bench: Mapping[str, Any] | None = None  # a report of `headstart bench`: costs from it
    bench_name: str = ""  # the report's file
    weights: Weights = "as-dtype"
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.max_drafts <= MAX_DRAFTS:
            raise ConfigError(
                f"--max-drafts is {self.max_drafts}; give a number from 1 to {MAX_DRAFTS}."
            )
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise ConfigError(
                f"--requests is {self.requests}; give a number from 1 to {MAX_REQUESTS}."
            )
        if self.draft_from_answers < 0:
            raise ConfigError(
                f"--draft-from-answers is {self.draft_from_answers}; give 0 or a number of answers."
            )
        if self.own != 0:
            check_limit(self.own)
        if self.vocab is None:
            check_beside(self.own, "--vocab")
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise ConfigError(f"--bandwidth is {self.bandwidth:g}; give GB/s, a number above 0.")
        if self.bandwidth is not None and self.bench is not None:
            raise ConfigError("--bandwidth and --bench both say what rounds cost. Drop one.")

    @property
    def answers_copied(self) -> str:
        """Which other answers may be copied from, in words; nothing where none may."""
        count = self.draft_from_answers
        return f"; also from up to {count} answers before, in the order of the data" * bool(count)

    @property
    def is_timed(self) -> bool:
        """Whether rounds of the engine are timed here."""
        return self.bandwidth is None and self.bench is None
