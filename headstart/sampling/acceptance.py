"""Which drafts are accepted, by the match rule or the rejection rule, and counters by depth.

Match: a draft is accepted when it is what the target chose anyway, so the text is the target's
whatever was drafted. Rejection: a draft is accepted with probability target/draft, and what
follows a rejection is drawn from the rest of the target's distribution; the distribution is the
target's, the text depends on K.

B requests, K drafts, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headstart.sampling import noise

Rounds = Mapping[tuple[int, int], int]  # how many had so many drafts, and so many accepted


def reject(
    draft_ids: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    num_drafts: Tensor,
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts [B] and the token that follows them [B].

    draft_ids [B, K]; draft_probs [B, K, V], exactly what each draft was drawn from; target_probs
    [B, K + 1, V]; positions [B] of the first draft. The token that follows is drawn from
    max(target - draft, 0) after a rejection, from the target in the bonus row. The bonus row uses
    the noise of `choose`, so without drafts both rules give the same text.
    """
    kept = accept_mask(draft_ids, draft_probs, target_probs, seeds, positions)
    num_accepted = _count_leading(kept, num_drafts)
    is_bonus = num_accepted == num_drafts.to(num_accepted)
    row = num_accepted.view(-1, 1, 1).expand(-1, 1, target_probs.shape[-1])
    target = target_probs.gather(1, row).squeeze(1)
    padded = torch.cat((draft_probs, torch.zeros_like(target_probs[:, :1])), 1)
    draft = padded.gather(1, row).squeeze(1).masked_fill(is_bonus.unsqueeze(-1), 0.0)
    rest = residual(target, draft)
    at = torch.as_tensor(positions, device=rest.device) + num_accepted
    purpose = torch.where(is_bonus, noise.CHOICE, noise.RESIDUAL)
    tokens = torch.arange(rest.shape[-1], device=rest.device)
    return num_accepted, (rest.log() + noise.gumbel(seeds, at, tokens, purpose)).argmax(-1)


def accept_mask(
    draft_ids: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
) -> Tensor:
    """Whether each draft passes its own test, [B, K], whatever became of those before it."""
    index = draft_ids.unsqueeze(-1)
    p_draft = draft_probs.gather(-1, index).squeeze(-1)
    p_target = target_probs[:, : draft_ids.shape[-1]].gather(-1, index).squeeze(-1)
    at = torch.as_tensor(positions, device=draft_ids.device)
    tests = [
        noise.uniform(seeds, at + depth, draft_ids[:, depth : depth + 1], noise.ACCEPTANCE)
        for depth in range(draft_ids.shape[-1])
    ]
    if not tests:
        return torch.zeros_like(draft_ids, dtype=torch.bool)
    return torch.cat(tests, -1) * p_draft < p_target  # u < target/draft, without dividing by 0


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """max(target - draft, 0), not normalised; the target itself where rounding leaves nothing."""
    rest = (target - draft).clamp_min(0)
    return torch.where(rest.amax(-1, keepdim=True) > 0, rest, target)


def _count_leading(kept: Tensor, num_drafts: Tensor) -> Tensor:
    depths = torch.arange(kept.shape[-1], device=kept.device)
    counted = kept & (depths < num_drafts.to(kept.device).unsqueeze(-1))
    return counted.to(torch.int64).cumprod(-1).sum(-1)


def _grow(counts: list[int], depth: int) -> None:
    counts.extend([0] * (depth - len(counts)))


@dataclass
class Acceptance:
    """What became of drafts.

    Rates are `cumulative` (per round that drafted so deep) or `conditional` (given that the depth
    before was right). Rounds may draft differently many tokens, so both have counts of their own:
    rounds that draft deep are the promising ones, and a ratio of cumulative rates could exceed 1.
    """

    rounds: int = 0  # verification rounds, those without drafts included
    drafted: list[int] = field(default_factory=list)  # by depth
    accepted: list[int] = field(default_factory=list)  # by depth
    # By depth: the rounds that drafted there and had everything before it accepted.
    tried: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Rounds) -> Acceptance:
        found = cls()
        for (num_drafts, num_accepted), count in rounds.items():
            found.observe(num_drafts, num_accepted, count)
        return found

    def observe(self, num_drafts: int, num_accepted: int, count: int = 1) -> None:
        """One round, or several alike."""
        self.rounds += count
        _grow(self.drafted, num_drafts)
        _grow(self.accepted, num_drafts)
        _grow(self.tried, num_drafts)
        for depth in range(num_drafts):
            self.drafted[depth] += count
            self.accepted[depth] += count * (depth < num_accepted)
            self.tried[depth] += count * (depth <= num_accepted)

    def add(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        _grow(self.drafted, len(other.drafted))
        _grow(self.accepted, len(other.accepted))
        _grow(self.tried, len(other.tried))
        for depth, (drafted, accepted, tried) in enumerate(
            zip(other.drafted, other.accepted, other.tried, strict=True)
        ):
            self.drafted[depth] += drafted
            self.accepted[depth] += accepted
            self.tried[depth] += tried

    @property
    def cumulative(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional(self) -> list[float]:
        return [a / t if t else 0.0 for a, t in zip(self.accepted, self.tried, strict=True)]

    @property
    def per_round(self) -> list[float]:
        """By depth, also of rounds that drafted less: `length` is 1 and the sum of these."""
        return [accepted / self.rounds if self.rounds else 0.0 for accepted in self.accepted]

    @property
    def length(self) -> float:
        """Acceptance length: tokens per trunk pass, recovered and bonus tokens included."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "tried": list(self.tried),
            "cumulative_acceptance": self.cumulative,
            "conditional_acceptance": self.conditional,
            "acceptance_length": self.length,
        }
