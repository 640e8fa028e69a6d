"""The options of quantising a head, which are also flags; importing it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headstart.errors import ConfigError

MOST_DRAFTS = 16


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Into which format, and how much acceptance that may cost."""

    bits: Literal["4", "8", "fp8"] = field(
        default="4",
        metadata={"help": "integers of 4 bits in groups, of 8 bits by row, or 8-bit floats by row"},
    )
    lm_head: bool = field(
        default=True, metadata={"help": "also a quantised copy of the LM head, for drafts alone"}
    )
    max_loss: float = field(
        default=0.03,
        metadata={"help": "refuse to lose a larger share of the acceptance length"},
    )
    max_drafts: int = field(
        default=3, metadata={"help": "K: depths whose inputs count, and at which loss is measured"}
    )
    limit: int = field(
        default=128, metadata={"help": "answers of each split that are read at most"}
    )

    def __post_init__(self) -> None:
        if not 1 <= self.max_drafts <= MOST_DRAFTS:
            raise ConfigError(
                f"--max-drafts is {self.max_drafts}; give a number from 1 to {MOST_DRAFTS}."
            )
        if not 0 <= self.max_loss <= 1:
            raise ConfigError(
                f"--max-loss is {self.max_loss:g}; give a share from 0 to 1, such as 0.03."
            )
