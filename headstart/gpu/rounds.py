"""One round of all seats, from drafts to accepted tokens, without the host: `run_round`.

The head first reads what it has not read yet, which gives the first draft; it goes on by itself
for the others; one trunk pass over the newest token and the drafts gives the choices, and
the leading drafts that equal them are accepted. Only kernels, so a graph can hold it all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.gpu.forward import Attend, Kernels, Rows
from headstart.gpu.seats import Seats
from headstart.kernels.attention import paged_attention
from headstart.kernels.choice import choose_truncated
from headstart.kernels.rounds import accept, chain_rows, head_rows, keep_states, trunk_rows
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class Model:
    """What a round runs: weights, K/V memory, and the rows of the LM head that draft."""

    trunk: Trunk
    head: MTPHead | None
    caches: list[LayerCache]
    head_cache: LayerCache | None
    boundary: Tensor  # [blocks, D]: the state that the slot after each block needs
    block_size: int
    draft_lm_head: Linear  # N outputs
    draft_ids: Tensor | None  # [N] where the draft vocabulary is reduced
    max_context: int
    kernels: Kernels = field(default_factory=Kernels)


@dataclass(frozen=True)
class Kind:
    """What makes one round a different program than another."""

    count: int  # of seats, from the first
    num_drafts: int  # at most, per seat
    head_rows: int  # pending tokens that the head reads; 0, only without drafts: none
    is_truncated: bool = False  # whether somebody chooses among few tokens


def run_round(model: Model, seats: Seats, kind: Kind) -> None:
    """One round, launched and not waited for."""
    count, num_drafts, head_rows = kind.count, kind.num_drafts, kind.head_rows
    assert head_rows or not num_drafts
    lengths, left = seats.lengths[:count], seats.left[:count]
    limits, tables = seats.limits[:count], seats.tables[:count]
    newest = _newest(seats, count)
    drafts = _drafts(model, seats, kind)
    rows = num_drafts + 1
    positions, places, seen = trunk_rows(lengths, left, limits, tables, model.block_size, rows)
    ids = torch.cat([newest[:, None], drafts], 1).flatten()
    where = Rows(positions, places, _attention(model, seen, tables, rows, first_slot=0))
    stream, normed = model.kernels.trunk(model.trunk, ids, where, model.caches)
    choices = _choose(
        model, seats, kind, normed, _chosen_positions(lengths, rows), model.trunk.lm_head,
        None,
    ).view(count, rows)  # fmt: skip
    accept(
        drafts, choices, limits, lengths, left, seats.pending[:count], seats.tokens[:count],
        seats.emitted[:count], has_read=head_rows > 0 or model.head is None,
    )  # fmt: skip
    if model.head is not None:
        before = model.head.layout.trunk_hidden == "before_final_norm"
        states = (stream if before else normed).view(count, rows, -1)
        keep_states(
            states, seats.states[:count], model.boundary, lengths, seats.pending[:count],
            seats.emitted[:count], tables, model.block_size,
        )  # fmt: skip


def _newest(seats: Seats, count: int) -> Tensor:
    """[B] the last token of each seat."""
    last = (seats.pending[:count].long() - 1).clamp_min(0)
    return seats.tokens[:count].gather(1, last[:, None]).squeeze(1)


def _chosen_positions(lengths: Tensor, rows: int) -> Tensor:
    """[B * rows]: the absolute positions of the tokens that the rows choose."""
    depth = torch.arange(rows, device=lengths.device)
    return (lengths.long()[:, None] + depth).flatten()


def _drafts(model: Model, seats: Seats, kind: Kind) -> Tensor:
    """[B, K] guesses of the head, after it has read its pending tokens."""
    count, rows = kind.count, kind.head_rows
    none = torch.empty(count, 0, dtype=torch.int64, device=seats.lengths.device)
    if rows == 0 or model.head is None or model.head_cache is None:
        return none
    module, embed, rotary = model.head.module(1), model.trunk.embed, model.trunk.rotary
    lengths, left = seats.lengths[:count], seats.left[:count]
    limits, tables, pending = seats.limits[:count], seats.tables[:count], seats.pending[:count]
    positions, places, seen = head_rows(lengths, left, pending, tables, model.block_size, rows)
    where = Rows(positions, places, _attention(model, seen, tables, rows, first_slot=1))
    normed, recycled = model.kernels.head(
        module, embed[seats.tokens[:count, :rows].flatten()],
        seats.states[:count, :rows].flatten(0, 1), where, rotary, model.head_cache,
    )  # fmt: skip
    if kind.num_drafts == 0:
        return none
    # Only the newest token's row guesses.
    last = torch.arange(count, device=lengths.device) * rows + (pending.long() - 1).clamp_min(0)
    normed, recycled = normed[last], recycled[last]
    drafts = [_guess(model, seats, kind, normed, 0)]
    for depth in range(2, kind.num_drafts + 1):
        positions, places, seen = chain_rows(lengths, left, limits, tables, model.block_size, depth)
        where = Rows(positions, places, _attention(model, seen, tables, 1, first_slot=1))
        normed, recycled = model.kernels.head(
            module, embed[drafts[-1]], recycled, where, rotary, model.head_cache
        )
        drafts.append(_guess(model, seats, kind, normed, depth - 1))
    return torch.stack(drafts, 1)


def _guess(model: Model, seats: Seats, kind: Kind, normed: Tensor, ahead: int) -> Tensor:
    """[B] the head's choice, with the noise that the trunk's choice of that token will have."""
    positions = seats.lengths[: kind.count].long() + ahead
    return _choose(model, seats, kind, normed, positions, model.draft_lm_head, model.draft_ids)


def _choose(
    model: Model, seats: Seats, kind: Kind, normed: Tensor, positions: Tensor, lm_head: Linear,
    token_ids: Tensor | None,
) -> Tensor:  # fmt: skip
    """[M] choices of rows that belong to the seats in order, equally many to each."""
    each = normed.shape[0] // kind.count

    def by_row(values: Tensor) -> Tensor:
        return values[: kind.count].repeat_interleave(each)

    noise = by_row(seats.heat), by_row(seats.seeds), positions
    if not kind.is_truncated:
        return model.kernels.choose(normed, lm_head, *noise, token_ids)
    cuts = by_row(seats.top_k), by_row(seats.top_p), by_row(seats.min_p)
    return choose_truncated(model.kernels.whole(normed, lm_head), *noise, *cuts, token_ids)


def _attention(model: Model, seen: Tensor, tables: Tensor, rows: int, *, first_slot: int) -> Attend:
    seats = seen.shape[0]

    def attend(q: Tensor, cache: LayerCache) -> Tensor:
        result = paged_attention(
            q.view(seats, rows, *q.shape[1:]), cache.k, cache.v, tables, seen,
            block_size=model.block_size, max_context=model.max_context,
            cut=_cut(seats), first_slot=first_slot,
        )  # fmt: skip
        return result.view(seats * rows, -1)

    return attend


def _cut(seats: int) -> int:
    """Tokens per piece of context: small where few requests must fill the GPU."""
    return 64 if seats <= 2 else 128 if seats <= 4 else 256 if seats <= 16 else 512
