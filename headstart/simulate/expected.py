"""Expected acceptance by formula, where no noise can be replayed: from both distributions.

At a row, let target and draft be the two distributions after temperature and truncation, and a
the token of the text. Three ways to draft and accept:

    rejection      drafted from the draft's distribution, accepted by the rejection rule:
                   sum over v of min(target[v], draft[v])
    greedy drafts  the draft's most likely token d, accepted with target[d]
    shared noise   both choose with the same Gumbel noise, accepted when equal. Given that the
                   target chose a: 1 / sum over v of max(target[v], draft[v] * target[a] / draft[a])

Depth k counts rows by how likely the text's own tokens of depths 1 to k - 1 were accepted drafts.
For a text that the target sampled at these settings, that makes row averages unbiased. Of a text
that was sampled otherwise, the shared noise is only bounded, by (1 - TV) / (1 + TV) from below.

M rows of answers, K depths, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.sampling.choose import draft_probs, target_probs
from headstart.sampling.params import Row
from headstart.simulate.answers import Answer, Batch
from headstart.simulate.matches import DraftLogits, Targets

RULES = ("rejection", "greedy_drafts", "shared_noise")


@dataclass(frozen=True)
class Expected:
    """Sums over the rows of one answer, by rule and depth: [3, K] each."""

    answer: Answer
    accepted: Tensor
    weight: Tensor


@torch.no_grad()
def expectations(
    depths: Sequence[Tensor],
    batch: Batch,
    answers: Sequence[Answer],
    logits: DraftLogits,
    target_logits: Callable[[Tensor], Tensor],
    *,
    is_own_text: bool,
) -> list[Expected]:
    """`target_logits` maps states [R, D] as the batch has them to the trunk's logits [R, V]."""
    targets = Targets.of(batch, answers)
    vocab = int(target_logits(batch.states[:1]).shape[-1])
    shape = (len(RULES), len(targets.rows), len(depths))
    rate, step = torch.zeros(2, *shape, dtype=torch.float64, device=batch.ids.device)
    known = torch.zeros(shape[1:], dtype=torch.bool, device=batch.ids.device)
    for part in targets.chunks(vocab):
        rows, places = targets.rows[part], targets.places[part]
        sampling = targets.sampling_rows(part)
        target = target_probs(
            target_logits(batch.states[rows]), _with_history(targets, batch, part, sampling)
        )
        for depth, states in enumerate(depths, 1):
            at = (places >= depth).nonzero().squeeze(-1)
            kept = at.tolist()
            if not kept:
                break
            values = logits.at(depth, states[rows[at] - depth], rows[at] - (depth - 1))
            draft = draft_probs(values, [sampling[i] for i in kept], logits.ids, vocab)
            found = _rates(target[at], draft, batch.ids[rows[at] + 1], is_own_text=is_own_text)
            place = part.start + at - (depth - 1)
            rate[:, place, depth - 1], step[:, place, depth - 1] = found
            known[place, depth - 1] = True
    # A row counts at depth k as far as the drafts before were accepted ones.
    weight = torch.cat([torch.ones_like(step[..., :1]), step[..., :-1]], -1).cumprod(-1)
    weight = weight * known
    accepted = torch.split(rate * weight, targets.sizes, 1)
    parts = zip(answers, accepted, torch.split(weight, targets.sizes, 1), strict=True)
    return [Expected(answer, a.sum(1).cpu(), w.sum(1).cpu()) for answer, a, w in parts]


def _rates(
    target: Tensor, draft: Tensor, tokens: Tensor, *, is_own_text: bool
) -> tuple[Tensor, Tensor]:
    """Expected acceptance, and that of the text's own token: [3, R] each, in the order of RULES."""
    target, draft = target.double(), draft.double()
    at = tokens.unsqueeze(-1)
    own_target, own_draft = (x.gather(-1, at).squeeze(-1) for x in (target, draft))
    overlap = torch.minimum(target, draft).sum(-1)
    ratio = own_draft / own_target.clamp_min(torch.finfo(target.dtype).tiny)
    survives = torch.where(own_target > 0, ratio.clamp_max(1), 0.0)
    best = draft.argmax(-1)
    greedy = target.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    if is_own_text:
        scale = (own_target / own_draft).nan_to_num(0, 0, 0).unsqueeze(-1)
        both = torch.maximum(target, draft * scale).sum(-1)
        shared = torch.where((own_draft > 0) & (own_target > 0), 1 / both, 0.0)
        shared_step = shared
    else:
        shared, shared_step = overlap / (2 - overlap), survives
    rates = torch.stack([overlap, greedy, shared])
    return rates, torch.stack([survives, (best == tokens).double(), shared_step])


def _with_history(targets: Targets, batch: Batch, part: slice, rows: list[Row]) -> list[Row]:
    """The target's penalties look at prompt and output; drafts do without them."""
    if not any(answer.params.has_penalties for answer in targets.answers):
        return rows
    result, begin = list(rows), 0
    for answer, size in zip(targets.answers, targets.sizes, strict=True):
        start = batch.documents.starts[answer.document]
        ids = batch.ids[start : start + answer.stop].tolist()
        for at in range(max(begin, part.start), min(begin + size, part.stop)):
            place = at - begin + 1
            result[at - part.start] = replace(
                rows[at - part.start], prompt_ids=ids[: answer.start],
                output_ids=ids[answer.start : answer.start + place],
            )  # fmt: skip
        begin += size
    return result
