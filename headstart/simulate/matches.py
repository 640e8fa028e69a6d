"""Which of a head's drafts would have been right, at every row of known answers.

With context `prefix`, teacher forcing is exact: a wrong draft ends its chain, and up to there the
head was fed what serving would have fed it. The draft of depth k is chosen as the engine does it:
arg-max at temperature 0, else with the noise that chose the answer. `walk` counts as the engine
does: from the first answer token, round by round.

M rows of answers, K depths, V tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable
from headstart.models.unroll import unroll
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.choose import choose_drafts
from headstart.sampling.params import Row
from headstart.simulate.answers import Answer, Batch
from headstart.simulate.own_columns import OwnColumns

_CHUNK_VALUES = 1 << 24  # logits in memory at a time


@dataclass(frozen=True)
class DraftLogits:
    """The LM head that drafts; column i of a reduced one stands for token ids[i]."""

    compute: Callable[[Tensor], Tensor]  # states [R, D] -> logits [R, V], at least fp32
    ids: Tensor | None = None
    by_depth: tuple[Callable[[Tensor], Tensor], ...] = ()  # of modules with LM heads of their own
    own: OwnColumns | None = None  # where columns are texts' own tokens, too

    def at(self, depth: int, states: Tensor, newest: Tensor) -> Tensor:
        """Logits of states [R, D] of a depth, from 1; newest [R]: the rows of the newest tokens."""
        compute = self.compute
        if self.by_depth:
            compute = self.by_depth[min(depth, len(self.by_depth)) - 1]
        values = compute(states)
        return values if self.own is None else self.own.close(values, newest)

    @classmethod
    def of_weight(cls, weight: Tensor, ids: Tensor | None = None) -> DraftLogits:
        """From the weight [V, D] of the whole vocabulary."""
        kept = weight if ids is None else weight[ids]

        def compute(states: Tensor) -> Tensor:
            values = states.to(kept.dtype) @ kept.T
            return values if values.dtype == torch.float64 else values.float()

        return cls(compute, ids)


@dataclass(frozen=True)
class Matches:
    """is_match[i, k - 1]: whether the draft of depth k, made when a_i was the newest, is a_(i+k).

    Rows a_0 to a_(n-2); False behind the answer's end, where drafts are right for nothing.
    """

    answer: Answer
    is_match: Tensor  # bool [n - 1, K]

    @property
    def num_leading(self) -> Tensor:
        """[n - 1]: drafts that are right from depth 1 on."""
        return self.is_match.long().cumprod(-1).sum(-1)


def without_head(answer: Answer) -> Matches:
    """Of a model that has none: no depth has drafts."""
    return Matches(answer, torch.zeros(max(0, answer.num_tokens - 1), 0, dtype=torch.bool))


@dataclass(frozen=True)
class Targets:
    """The answer tokens that drafts guess: a_1, a_2, ... of all answers, one after another."""

    answers: Sequence[Answer]
    rows: Tensor  # [M] the row whose trunk state gives this token
    places: Tensor  # [M] j of a_j
    sizes: list[int]  # how many belong to each answer

    @classmethod
    def of(cls, batch: Batch, answers: Sequence[Answer]) -> Targets:
        device = batch.ids.device
        sizes = [max(0, answer.num_tokens - 1) for answer in answers]
        starts = [batch.documents.starts[answer.document] + answer.start for answer in answers]
        places = [torch.arange(1, size + 1) for size in sizes]
        rows = [start - 1 + place for start, place in zip(starts, places, strict=True)]
        none = [torch.zeros(0, dtype=torch.int64)]
        return cls(
            answers, torch.cat(none + rows).to(device), torch.cat(none + places).to(device), sizes
        )

    def chunks(self, num_columns: int) -> Iterator[slice]:
        step = max(1, _CHUNK_VALUES // num_columns)
        for start in range(0, len(self.rows), step):
            yield slice(start, start + step)

    def sampling_rows(self, part: slice) -> list[Row]:
        """How the engine chooses (and drafts) each of these tokens; penalties are not included."""
        result: list[Row] = []
        begin = 0
        for answer, size in zip(self.answers, self.sizes, strict=True):
            low, high = max(begin, part.start), min(begin + size, part.stop)
            if answer.params.is_plain_greedy:
                result += [_GREEDY_ROW] * max(0, high - low)
            else:
                result += [sampling_row(answer, at - begin + 1) for at in range(low, high)]
            begin += size
        return result

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [M, ...] by answer."""
        return list(torch.split(values, self.sizes))


def sampling_row(answer: Answer, place: int) -> Row:
    """How the engine chooses (and drafts) a_place; penalties are not included."""
    return Row(
        params=answer.params, seed=answer.seed, position=answer.start + place, num_output=place,
        end_ids=answer.end_ids,
    )  # fmt: skip


_GREEDY_ROW = sampling_row(Answer(record_id="", prompt_id="", start=1, stop=1), 0)


def unrolled(
    head: MTPHead, embed: Tensor, rotary: RotaryTable, batch: Batch, max_drafts: int
) -> list[Tensor]:
    """What the head says at depths 1 to `max_drafts`, [T, D] each, as serving would have it."""
    kind = next(head.parameters()).dtype
    return unroll(
        head, embed[batch.ids].to(kind), rotary, batch.states.to(kind), batch.documents,
        num_depths=max_drafts, context="prefix",
    )  # fmt: skip


@torch.no_grad()
def answer_matches(
    depths: Sequence[Tensor], batch: Batch, answers: Sequence[Answer], logits: DraftLogits
) -> list[Matches]:
    """Compare the drafts of `unrolled` with the answers themselves."""
    targets = Targets.of(batch, answers)
    found = torch.zeros(
        len(targets.rows), len(depths), dtype=torch.bool, device=targets.rows.device
    )
    for part in targets.chunks(_num_columns(logits, depths)):
        rows, places = targets.rows[part], targets.places[part]
        tokens, sampling = batch.ids[rows + 1], targets.sampling_rows(part)
        distances = places.tolist()
        for depth, states in enumerate(depths, 1):
            kept = [i for i, place in enumerate(distances) if place >= depth]
            if not kept:
                break
            at = torch.tensor(kept, device=rows.device)
            # The guess of a_j at depth k was made when a_(j-k) was the newest.
            values = logits.at(depth, states[rows[at] - depth], rows[at] - (depth - 1))
            guesses = choose_drafts(values, [sampling[i] for i in kept], logits.ids)
            found[part.start + at - (depth - 1), depth - 1] = guesses == tokens[at]
    parts = targets.split(found.cpu())
    return [Matches(answer, part) for answer, part in zip(answers, parts, strict=True)]


def _num_columns(logits: DraftLogits, depths: Sequence[Tensor]) -> int:
    if logits.ids is not None:
        return len(logits.ids)
    return int(logits.compute(depths[0][:1]).shape[-1]) if depths else 1


def walk(matches: Matches, num_drafts: int) -> Acceptance:
    """The counters of decoding this answer with K = `num_drafts`, as the engine counts them.

    A round drafts no more than the answer has room for, less the token that it gives anyway; an
    end token ends the walk, and what was drafted behind it counts as drafted.
    """
    answer, leading = matches.answer, matches.num_leading.tolist()
    counters, newest = Acceptance(), 0
    while newest < answer.num_tokens - 1:
        room = answer.limit - (newest + 1) - 1
        drafts = max(0, min(num_drafts, room))
        accepted = min(leading[newest], drafts)
        counters.observe(drafts, accepted)
        newest += accepted + 1
    return counters


def every_row(matches: Matches) -> Acceptance:
    """Counters as if a round began at every token: for row averages."""
    leading, depths = matches.num_leading, matches.is_match.shape[-1]
    rows = len(leading)
    accepted = [int((leading >= depth).sum()) for depth in range(1, depths + 1)]
    return Acceptance(rows, [rows] * depths, accepted, [rows, *accepted][:depths])
