"""Choices of tokens from logits: by the sampling package, which is the reference.

A backend may override each of these with something faster that chooses the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from headstart.sampling import acceptance
from headstart.sampling import choose as sampling
from headstart.sampling.params import Row

RowLogprobs = tuple[float, dict[int, float]]  # of the token, and of the best ones at its place


class Chooser:
    """Rows of logits in, tokens out; the same whatever rows there are beside one."""

    chooses_one_by_one = False  # whether rows must be sampled in tensors of their own

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """The trunk's choice at each row."""
        return [int(token) for token in sampling.choose(logits, rows).tolist()]

    def choose_drafts(
        self, logits: Tensor, rows: Sequence[Row], token_ids: Tensor | None
    ) -> list[int]:
        """The head's choice at each row; token_ids are those of a draft vocabulary."""
        return [int(token) for token in sampling.choose_drafts(logits, rows, token_ids).tolist()]

    def draft_probs(
        self, logits: Tensor, rows: Sequence[Row], token_ids: Tensor | None, num_tokens: int
    ) -> Tensor:
        """[rows, tokens] what drafts are drawn from, for the rejection rule."""
        return sampling.draft_probs(logits, rows, token_ids, num_tokens)

    def reject(
        self, logits: Tensor, rows: Sequence[Row], drafts: Sequence[int], draft_probs: Tensor
    ) -> tuple[int, int]:
        """Of one request how many drafts the rejection rule accepts, and the token that follows.

        logits and rows: one more than drafts; draft_probs [drafts, tokens].
        """
        target = sampling.target_probs(logits, rows)
        accepted, following = acceptance.reject(
            torch.tensor([drafts], device=logits.device),
            draft_probs.unsqueeze(0).to(target.dtype),
            target.unsqueeze(0),
            torch.tensor([len(drafts)], device=logits.device),
            [rows[0].seed],
            [rows[0].position],
        )
        count = int(accepted[0])
        if self.choose(logits[count : count + 1], rows[count : count + 1])[0] < 0:
            return count, sampling.NOTHING_ALLOWED
        return count, int(following[0])

    def logprobs(
        self, logits: Tensor, at: Sequence[int], ids: Sequence[int], rows: Sequence[Row]
    ) -> list[RowLogprobs]:
        """What the `params.logprobs` of rows ask for, of the tokens that they gave.

        `at`: where each row's logits are. Rows of a request follow one another.
        """

        def together(index: int) -> int:
            return index if self.chooses_one_by_one else id(rows[index].params)

        result: list[RowLogprobs] = []
        for _, group in groupby(range(len(rows)), together):
            own = list(group)
            part, params = slice(own[0], own[-1] + 1), rows[own[0]].params
            assert params.logprobs is not None
            values = logits[list(at[part])]  # a copy: a row alone is computed as any other alone
            tokens = torch.tensor(ids[part], device=logits.device)
            found = sampling.logprobs(
                values, tokens, params.logprobs, params.logprobs_mode, rows[part]
            )
            numbers, names, best = (part.tolist() for part in found)
            result += [
                (number, dict(zip(row_names, row_best, strict=True)))
                for number, row_names, row_best in zip(numbers, names, best, strict=True)
            ]
        return result
