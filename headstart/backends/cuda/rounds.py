"""One round of all requests, from drafts to accepted tokens, without the host: `run_round`.

The head first reads what it has not read yet, which gives the first draft; it goes on by itself
for the others; one trunk pass over the newest token and the drafts gives the choices, and
the leading drafts that equal them are accepted. Only kernels, so a graph can hold it all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headstart.backends.cuda.decode_batch import DecodeBatch
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
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import LayerStates
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class RoundModel:
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
class RoundShape:
    """What makes one round a different program than another."""

    count: int  # of requests, from the first
    num_drafts: int  # at most, per request
    head_rows: int  # pending tokens that the head reads; 0, only without drafts: none
    is_truncated: bool = False  # whether a request chooses among few tokens

    @classmethod
    def usual(cls, count: int, num_drafts: int) -> RoundShape:
        """The head reads what the round before may have left."""
        return cls(count, num_drafts, num_drafts + 1 if num_drafts else 0)


def run_round(model: RoundModel, batch: DecodeBatch, shape: RoundShape) -> None:
    """One round, launched and not waited for."""
    count, num_drafts, head_rows = shape.count, shape.num_drafts, shape.head_rows
    assert head_rows or not num_drafts
    lengths, left = batch.lengths[:count], batch.left[:count]
    limits, tables = batch.limits[:count], batch.tables[:count]
    rows = num_drafts + 1
    ids = torch.stack([_newest(batch, count), *_drafts(model, batch, shape)], 1)
    positions, places, seen = trunk_rows(lengths, left, limits, tables, model.block_size, rows)
    where = _rows(model, positions, places, seen, tables, rows, first_slot=0)
    if batch.recurrent is not None:
        recur = round_recur(model.kernels, batch.recurrent, model.states, seen, rows)
        where = replace(where, recur=recur)
    stream, normed = model.kernels.trunk(model.trunk, ids.flatten(), where, model.caches)
    choices = _choose(model, batch, shape, normed, 0, model.trunk.lm_head, None)
    accept(
        ids[:, 1:], choices.view(count, rows), limits, lengths, left, batch.pending[:count],
        batch.tokens[:count], batch.emitted[:count], has_read=head_rows > 0 or model.head is None,
    )  # fmt: skip
    if batch.recurrent is not None:
        batch.recurrent.replays[:count] = batch.emitted[:count, 0]  # to be repeated next time
    if model.head is not None:
        before = model.head.layout.trunk_hidden == "before_final_norm"
        states = (stream if before else normed).view(count, rows, -1)
        keep_states(
            states, batch.states[:count], model.boundary, lengths, batch.pending[:count],
            batch.emitted[:count], tables, model.block_size,
        )  # fmt: skip


def _newest(batch: DecodeBatch, count: int) -> Tensor:
    """[B] the last token of each request."""
    last = (batch.pending[:count].long() - 1).clamp_min(0)
    return batch.tokens[:count].gather(1, last[:, None]).squeeze(1)


def _drafts(model: RoundModel, batch: DecodeBatch, shape: RoundShape) -> list[Tensor]:
    """K times [B]: guesses of the head, after it has read its pending tokens."""
    count, rows = shape.count, shape.head_rows
    if rows == 0 or model.head is None or model.head_cache is None:
        return []
    lengths, left = batch.lengths[:count], batch.left[:count]
    limits, tables, pending = batch.limits[:count], batch.tables[:count], batch.pending[:count]
    normed, recycled = _read(
        model, batch.tokens[:count, :rows], batch.states[:count, :rows], lengths, left, pending,
        tables,
    )  # fmt: skip
    if shape.num_drafts == 0:
        return []
    module, embed, rotary = model.head.module(1), model.trunk.embed, model.trunk.rotary
    # Only the newest token's row guesses.
    normed, recycled = newest_rows(normed, recycled, pending)
    lm_head = model.draft_lm_head
    drafts = [_choose(model, batch, shape, normed, 0, lm_head, model.draft_ids)]
    for depth in range(2, shape.num_drafts + 1):
        positions, places, seen = chain_rows(lengths, left, limits, tables, model.block_size, depth)
        where = _rows(model, positions, places, seen, tables, 1, first_slot=1)
        normed, recycled = model.kernels.head(
            module, drafts[-1][:, None], recycled[:, None], where, embed, rotary, model.head_cache
        )
        guess = _choose(model, batch, shape, normed, depth - 1, lm_head, model.draft_ids)
        drafts.append(guess)
    return drafts


def _read(
    model: RoundModel, tokens: Tensor, states: Tensor, lengths: Tensor, left: Tensor,
    pending: Tensor, tables: Tensor,
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
    model: RoundModel, batch: DecodeBatch, shape: RoundShape, normed: Tensor, ahead: int,
    lm_head: Linear, token_ids: Tensor | None,
) -> Tensor:  # fmt: skip
    """[M] choices of rows that belong to the requests in order, equally many to each.

    A draft is chosen with the noise that the trunk's choice of that token will have: the first
    row of a request chooses `ahead` tokens behind the end.
    """
    count, each = shape.count, normed.shape[0] // shape.count
    noise = noise_rows(batch.lengths[:count], batch.heat[:count], batch.seeds[:count], each, ahead)
    if not shape.is_truncated:
        return model.kernels.choose(normed, lm_head, *noise, token_ids)

    def by_row(values: Tensor) -> Tensor:
        return values[:count].repeat_interleave(each)

    cuts = by_row(batch.top_k), by_row(batch.top_p), by_row(batch.min_p)
    return model.kernels.choose_truncated(
        model.kernels.whole(normed, lm_head), *noise, *cuts, token_ids
    )


def _rows(
    model: RoundModel, positions: Tensor, places: Tensor, seen: Tensor, tables: Tensor, rows: int,
    *, first_slot: int,
) -> Rows:  # fmt: skip
    """`rows` new rows of each request."""
    own: dict[str, int] = {
        "block_size": model.block_size, "max_context": model.max_context, "first_slot": first_slot,
    }  # fmt: skip
    attend = model.kernels.paged(tables, seen, rows, **own)
    latent = model.kernels.paged_latent(tables, seen, rows, **own)
    return Rows(positions, places, attend, latent=latent)
