"""One round of all seats, from drafts to accepted tokens, without the host: `run_round`.

The head first reads what it has not read yet, which gives the first draft; it goes on by itself
for the others; one trunk pass over the newest token and the drafts gives the choices, and
the leading drafts that equal them are accepted. Only kernels, so a graph can hold it all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headstart.backends.cuda.forward import Kernels, Rows
from headstart.backends.cuda.kernels.inputs import newest_rows, noise_rows
from headstart.backends.cuda.kernels.rounds import (
    accept,
    chain_rows,
    head_rows,
    keep_states,
    trunk_rows,
)
from headstart.backends.cuda.recurrent import round_recur
from headstart.backends.cuda.seats import Seats
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import LayerStates
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
    states: list[LayerStates] = field(default_factory=list)  # of the recurrent layers


@dataclass(frozen=True)
class Kind:
    """What makes one round a different program than another."""

    count: int  # of seats, from the first
    num_drafts: int  # at most, per seat
    head_rows: int  # pending tokens that the head reads; 0, only without drafts: none
    is_truncated: bool = False  # whether somebody chooses among few tokens

    @classmethod
    def usual(cls, count: int, num_drafts: int) -> Kind:
        """The head reads what the round before may have left."""
        return cls(count, num_drafts, num_drafts + 1 if num_drafts else 0)


def run_round(model: Model, seats: Seats, kind: Kind) -> None:
    """One round, launched and not waited for."""
    count, num_drafts, head_rows = kind.count, kind.num_drafts, kind.head_rows
    assert head_rows or not num_drafts
    lengths, left = seats.lengths[:count], seats.left[:count]
    limits, tables = seats.limits[:count], seats.tables[:count]
    rows = num_drafts + 1
    ids = torch.stack([_newest(seats, count), *_drafts(model, seats, kind)], 1)
    positions, places, seen = trunk_rows(lengths, left, limits, tables, model.block_size, rows)
    where = _rows(model, positions, places, seen, tables, rows, first_slot=0)
    if seats.recurrent is not None:
        recur = round_recur(model.kernels, seats.recurrent, model.states, seen, rows)
        where = replace(where, recur=recur)
    stream, normed = model.kernels.trunk(model.trunk, ids.flatten(), where, model.caches)
    choices = _choose(model, seats, kind, normed, 0, model.trunk.lm_head, None)
    accept(
        ids[:, 1:], choices.view(count, rows), limits, lengths, left, seats.pending[:count],
        seats.tokens[:count], seats.emitted[:count], has_read=head_rows > 0 or model.head is None,
    )  # fmt: skip
    if seats.recurrent is not None:
        seats.recurrent.replays[:count] = seats.emitted[:count, 0]  # to be repeated next time
    if model.head is not None:
        before = model.head.layout.trunk_hidden == "before_final_norm"
        states = (stream if before else normed).view(count, rows, -1)
        keep_states(
            states, seats.states[:count], model.boundary, lengths, seats.pending[:count],
            seats.emitted[:count], tables, model.block_size,
        )  # fmt: skip


def catch_up(model: Model, seats: Seats, at: Tensor, rows: int) -> None:
    """The head reads up to `rows` pending tokens for seats `at` alone; the newest stays pending.

    A round with head rows computes them for every seat: too much where few seats have a head.
    """
    tokens, states = seats.tokens[at][:, :rows], seats.states[at][:, :rows]
    pending = seats.pending[at]
    _read(model, tokens, states, seats.lengths[at], seats.left[at], pending, seats.tables[at])
    newest = (pending.long() - 1).clamp_min(0)
    each = torch.arange(len(at), device=at.device)
    seats.tokens[at, 0] = tokens[each, newest]
    seats.states[at, 0] = states[each, newest]
    seats.pending[at] = pending.clamp_max(1)


def _newest(seats: Seats, count: int) -> Tensor:
    """[B] the last token of each seat."""
    last = (seats.pending[:count].long() - 1).clamp_min(0)
    return seats.tokens[:count].gather(1, last[:, None]).squeeze(1)


def _drafts(model: Model, seats: Seats, kind: Kind) -> list[Tensor]:
    """K times [B]: guesses of the head, after it has read its pending tokens."""
    count, rows = kind.count, kind.head_rows
    if rows == 0 or model.head is None or model.head_cache is None:
        return []
    lengths, left = seats.lengths[:count], seats.left[:count]
    limits, tables, pending = seats.limits[:count], seats.tables[:count], seats.pending[:count]
    normed, recycled = _read(
        model, seats.tokens[:count, :rows], seats.states[:count, :rows], lengths, left, pending,
        tables,
    )  # fmt: skip
    if kind.num_drafts == 0:
        return []
    module, embed, rotary = model.head.module(1), model.trunk.embed, model.trunk.rotary
    # Only the newest token's row guesses.
    normed, recycled = newest_rows(normed, recycled, pending)
    lm_head = model.draft_lm_head
    drafts = [_choose(model, seats, kind, normed, 0, lm_head, model.draft_ids)]
    for depth in range(2, kind.num_drafts + 1):
        positions, places, seen = chain_rows(lengths, left, limits, tables, model.block_size, depth)
        where = _rows(model, positions, places, seen, tables, 1, first_slot=1)
        normed, recycled = model.kernels.head(
            module, drafts[-1][:, None], recycled[:, None], where, embed, rotary, model.head_cache
        )
        guess = _choose(model, seats, kind, normed, depth - 1, lm_head, model.draft_ids)
        drafts.append(guess)
    return drafts


def _read(
    model: Model, tokens: Tensor, states: Tensor, lengths: Tensor, left: Tensor, pending: Tensor,
    tables: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The head reads tokens [B, R] with their states [B, R, D], of which `pending` [B] count."""
    assert model.head is not None and model.head_cache is not None
    rows = tokens.shape[1]
    positions, places, seen = head_rows(lengths, left, pending, tables, model.block_size, rows)
    where = _rows(model, positions, places, seen, tables, rows, first_slot=1)
    return model.kernels.head(
        model.head.module(1), tokens, states, where, model.trunk.embed, model.trunk.rotary,
        model.head_cache,
    )  # fmt: skip


def _choose(
    model: Model, seats: Seats, kind: Kind, normed: Tensor, ahead: int, lm_head: Linear,
    token_ids: Tensor | None,
) -> Tensor:  # fmt: skip
    """[M] choices of rows that belong to the seats in order, equally many to each.

    A draft is chosen with the noise that the trunk's choice of that token will have: the first
    row of a seat chooses `ahead` tokens behind the end.
    """
    count, each = kind.count, normed.shape[0] // kind.count
    noise = noise_rows(seats.lengths[:count], seats.heat[:count], seats.seeds[:count], each, ahead)
    if not kind.is_truncated:
        return model.kernels.choose(normed, lm_head, *noise, token_ids)

    def by_row(values: Tensor) -> Tensor:
        return values[:count].repeat_interleave(each)

    cuts = by_row(seats.top_k), by_row(seats.top_p), by_row(seats.min_p)
    return model.kernels.choose_truncated(
        model.kernels.whole(normed, lm_head), *noise, *cuts, token_ids
    )


def _rows(
    model: Model, positions: Tensor, places: Tensor, seen: Tensor, tables: Tensor, rows: int,
    *, first_slot: int,
) -> Rows:  # fmt: skip
    """`rows` new rows of each seat."""
    own: dict[str, int] = {
        "block_size": model.block_size, "max_context": model.max_context, "first_slot": first_slot,
    }  # fmt: skip
    attend = model.kernels.paged(tables, seen, rows, **own)
    latent = model.kernels.paged_latent(tables, seen, rows, **own)
    return Rows(positions, places, attend, latent=latent)
