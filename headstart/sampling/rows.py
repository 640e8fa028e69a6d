"""One row of logits and all that its choice depends on.

A round of K drafts gives K + 1 rows per request. Row j carries the history that plain decoding
would have had: with anything else in it the text would depend on K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.sampling.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Row:
    """`prompt_ids` and `output_ids` are read only when `params.has_penalties`."""

    params: SamplingParams
    seed: int  # of the sample: see derive_seed; 64 bits
    position: int  # absolute position of the token to be chosen
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()  # so far, including the drafts before this row
    num_output: int = 0  # how many tokens that is, for min_tokens
    end_ids: frozenset[int] = frozenset()  # EOS and stop ids, which min_tokens holds back
    mask: Tensor | None = None  # bool [V], the tokens that the grammar allows

    @property
    def is_held_back(self) -> bool:
        """Whether min_tokens still forbids the end tokens."""
        return self.num_output < self.params.min_tokens and bool(self.end_ids)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the arg-max of the logits as they are."""
        return self.mask is None and self.params.is_plain_greedy
