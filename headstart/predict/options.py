"""The options of a prediction; importing it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.engine.options import MAX_DRAFTS
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.backends.options import Weights


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """How answers are scored and how the engine runs whose rounds are timed."""

    head: Path | None = None  # None: the model's own
    vocab: Path | None = None  # a file of draft vocabularies, scored beside the whole vocabulary
    temperature: float | None = None  # None: that of the answers
    rule: str = "match"
    max_drafts: int = 8
    bandwidth: float | None = None  # GB/s: costs from sizes; None: timed here
    weights: Weights = "as-dtype"
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.max_drafts <= MAX_DRAFTS:
            raise ConfigError(
                f"--max-drafts is {self.max_drafts}; give a number from 1 to {MAX_DRAFTS}."
            )
