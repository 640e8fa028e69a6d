"""The losses as data: what each needs, and its value and gradient from a few sums per row.

p is the trunk's distribution (target), q the head's (draft). The gradient of every loss on the
draft logits is a mixture of four vectors: q, p, q where q <= p, and the label's unit vector. So
a loss is five numbers per row, whichever way the rows and the vocabulary were cut into chunks.

Under a draft vocabulary S, q lives on S. KL compares with p renormalised on S; the overlap uses p
as it is, because a token outside S can never be accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.errors import ConfigError


@dataclass(frozen=True)
class Sums:
    """What the losses know of n rows, each [n]; sums run over S. NaN where not computed."""

    label_log_prob: Tensor  # log q[label]; of another token where has_label is False
    has_label: Tensor  # bool: the label is in S
    overlap: Tensor  # sum of min(p, q): the chance that rejection sampling accepts
    below: Tensor  # sum of q where q <= p
    mass: Tensor  # sum of p
    cross: Tensor  # sum of p * (log p - log q)
    has_top: Tensor  # bool: the arg-max of p over the whole vocabulary is in S


@dataclass(frozen=True)
class Terms:
    """A loss of n rows and the weights of its gradient on the draft logits, each [n]."""

    loss: Tensor
    is_kept: Tensor  # bool; rows that are not kept have loss and gradient 0
    draft: Tensor  # weight of q
    target: Tensor | None = None  # of p
    below: Tensor | None = None  # of q where q <= p
    label: Tensor | None = None  # of the label's unit vector


@dataclass(frozen=True)
class LossKind:
    """One loss: its formula, and which of the costlier sums the formula reads."""

    terms: Callable[[Sums, float], Terms]
    needs_teacher: bool = True
    needs_cross: bool = False
    needs_below: bool = False


def cross_entropy(sums: Sums, _: float) -> Terms:
    """-log q[label]. Rows whose label is outside S are dropped: no draft can hit it."""
    weight = sums.has_label.to(sums.label_log_prob.dtype)
    loss = torch.where(sums.has_label, -sums.label_log_prob, 0.0)
    return Terms(loss, sums.has_label, draft=weight, label=-weight)


def forward_kl(sums: Sums, _: float) -> Terms:
    """KL(p on S, q). Rows whose likeliest token is outside S are dropped: what is left of p there
    is its tail, and its shape would be learned at full weight."""
    mass = sums.mass.clamp_min(torch.finfo(sums.mass.dtype).tiny)
    loss = torch.where(sums.has_top, sums.cross / mass - mass.log(), 0.0)
    draft = sums.has_top.to(loss.dtype)
    return Terms(loss, sums.has_top, draft, target=torch.where(sums.has_top, -1 / mass, 0.0))


def total_variation(sums: Sums, _: float) -> Terms:
    """1 - overlap: the chance that rejection sampling rejects. No row is dropped."""
    is_kept = torch.ones_like(sums.has_top)
    return Terms(1 - sums.overlap, is_kept, sums.below, below=-torch.ones_like(sums.below))


def likelihood_hybrid(sums: Sums, decay: float) -> Terms:
    """lam * KL + (1 - lam) * TV with lam = exp(-decay * overlap), taken as a constant (arXiv
    2602.23881): KL where the head is still far off, TV's aim at acceptance once it is near.
    Rows that KL drops keep their TV part."""
    kl, tv = forward_kl(sums, decay), total_variation(sums, decay)
    far = torch.exp(-decay * sums.overlap)
    near = 1 - far
    assert kl.target is not None and tv.below is not None
    return Terms(
        far * kl.loss + near * tv.loss,
        tv.is_kept,
        draft=far * kl.draft + near * tv.draft,
        target=far * kl.target,
        below=near * tv.below,
    )


KINDS = {
    "ce": LossKind(cross_entropy, needs_teacher=False),
    "kl": LossKind(forward_kl, needs_cross=True),
    "lk": LossKind(likelihood_hybrid, needs_cross=True, needs_below=True),
    "tv": LossKind(total_variation, needs_below=True),
    # Rows as `tv`; `combine.end_to_end_loss` forms the product over depths.
    "e2e-tv": LossKind(total_variation, needs_below=True),
}


def loss_kind(name: str) -> LossKind:
    """The loss called `name`."""
    if name not in KINDS:
        raise ConfigError(f"loss is {name!r}; expected one of {', '.join(KINDS)}")
    return KINDS[name]
