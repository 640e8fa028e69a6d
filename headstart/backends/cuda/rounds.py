"""One round of all requests, from drafts to accepted tokens, without the host: `run_round`.

It has three parts. Drafts: what the head guesses (`drafting.py`). Trunk: one pass over the newest
token and the drafts. Choice: the trunk's choices, and the leading drafts that equal them are
accepted, or those that the rejection rule lets pass. Only kernels, so a graph can hold each; parts
hand over in tensors of the batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.drafting import adjusted_drafts, run_drafts
from headstart.backends.cuda.exact import ExactKernels
from headstart.backends.cuda.exact_recurrent import exact_round_recur
from headstart.backends.cuda.forward import Rows
from headstart.backends.cuda.kernels.adjusting import Adjusted, adjust, remember
from headstart.backends.cuda.kernels.attention import Packed
from headstart.backends.cuda.kernels.inputs import noise_rows
from headstart.backends.cuda.kernels.logprobs import logprobs_of
from headstart.backends.cuda.kernels.rejection import accept_drafts, follow, shares_of
from headstart.backends.cuda.kernels.rounds import (
    accept,
    keep_states,
    pack_trunk_rows,
    trunk_rows,
)
from headstart.backends.cuda.kernels.sampling import draw
from headstart.backends.cuda.kernels.squeezed import FEW_ROWS, fit_drafts, squeeze_trunk_rows
from headstart.backends.cuda.recurrent import round_recur
from headstart.backends.cuda.round_model import RoundModel
from headstart.backends.cuda.shapes import ChoiceShape, RoundShape, TrunkShape


def run_round(model: RoundModel, batch: DecodeBatch, shape: RoundShape) -> None:
    """One round, launched and not waited for."""
    run_drafts(model, batch, shape.drafts)
    run_trunk(model, batch, shape.trunk)
    run_choice(model, batch, shape.choice)


def run_trunk(model: RoundModel, batch: DecodeBatch, shape: TrunkShape) -> None:
    """One pass over newest tokens and drafts, and rows of prompts that join it.

    Their states are left in the batch.
    """
    place = _round_rows
    if shape.rows:
        place = _packed_rows if shape.groups else _squeezed_rows
    ids, where = place(model, batch, shape)
    stream, normed = model.kernels.trunk(model.trunk, ids, where, model.caches)
    if shape.rows and not shape.groups:
        _spread(model, batch, shape, stream, normed)
        return
    # There is room for more requests than decode, and so for more of their rows than the pass has.
    own = min(shape.count * (shape.num_drafts + 1), len(ids))
    batch.normed[:own] = normed[:own]
    if model.feeds_stream:
        batch.stream[:own] = stream[:own]
    if shape.rows:
        batch.packed.normed[: shape.rows] = normed
        batch.packed.stream[: shape.rows] = stream


def _round_rows(model: RoundModel, batch: DecodeBatch, shape: TrunkShape) -> tuple[Tensor, Rows]:
    """Token ids, and where the rows of a round go: as many of each request."""
    count, rows = shape.count, shape.num_drafts + 1
    tables = batch.tables[:count]
    placed = trunk_rows(
        batch.lengths[:count], batch.left[:count], batch.drafted[:count], tables, model.block_size,
        rows,
    )  # fmt: skip
    where = model.rows(placed, tables, rows, first_slot=0)
    if batch.recurrent is not None:
        given = batch.recurrent, model.states, placed[2], rows
        if isinstance(model.kernels, ExactKernels):
            recur = exact_round_recur(model.kernels, *given)
        else:
            recur = round_recur(model.kernels, *given)
        where = replace(where, recur=recur)
    # A single column would stay a view.
    return batch.ids[:count, :rows].flatten().contiguous(), where


def _packed_rows(model: RoundModel, batch: DecodeBatch, shape: TrunkShape) -> tuple[Tensor, Rows]:
    """Ids and places of a round's rows, if it has any, and of prompts behind them."""
    packed, count = batch.packed, shape.count
    ids, positions, kv_slots = (
        tensor[: shape.rows] for tensor in (packed.ids, packed.positions, packed.kv_slots)
    )
    groups = packed.of_groups(shape.rows, shape.groups)
    parts = [(packed.tables[: shape.groups], packed.seen[: shape.groups], groups)]
    if count:
        # Indices without a request make so many rows zero, which may be more than the pass has.
        assert count * (shape.num_drafts + 1) <= len(packed.attended)
        tables, drafted = batch.tables[:count], batch.ids[:count, : shape.num_drafts + 1]
        seen = pack_trunk_rows(
            batch.lengths[:count], batch.left[:count], batch.drafted[:count], tables,
            model.block_size, drafted, ids, positions, kv_slots,
        )  # fmt: skip
        own = packed.of_requests(shape.rows, shape.num_drafts + 1)
        parts.insert(0, (tables, seen, own))
    attend = model.kernels.packed(parts, block_size=model.block_size, max_context=model.max_context)
    return ids, Rows(positions, kv_slots, attend)


def _squeezed_rows(model: RoundModel, batch: DecodeBatch, shape: TrunkShape) -> tuple[Tensor, Rows]:
    """Ids and places of a pass in which each request has as many rows as it has drafts."""
    packed, count, rows = batch.packed, shape.count, shape.num_drafts + 1
    ids, positions, kv_slots = (
        tensor[: shape.rows] for tensor in (packed.ids, packed.positions, packed.kv_slots)
    )
    tables, drafted = batch.tables[:count], batch.drafted[:count]
    lengths, left = batch.lengths[:count], batch.left[:count]
    fit_drafts(lengths, left, drafted, most=rows - 1, rows=shape.rows)
    seen, starts, counts = squeeze_trunk_rows(
        lengths, left, drafted, tables, model.block_size, batch.ids[:count, :rows], ids, positions,
        kv_slots, packed.sources[: shape.rows], packed.places[: count * rows],
    )  # fmt: skip
    # A program has lines for all rows that a request of its part may have.
    attended = packed.attended[: shape.rows]
    few = tables, seen[0], Packed(min(FEW_ROWS, rows), attended, starts[0], counts[0])
    many = tables, seen[1], Packed(rows - 1, attended, starts[1], counts[1])
    parts = [few, many] if rows > FEW_ROWS else [few]
    attend = model.kernels.packed(parts, block_size=model.block_size, max_context=model.max_context)
    return ids, Rows(positions, kv_slots, attend)


def _spread(
    model: RoundModel, batch: DecodeBatch, shape: TrunkShape, stream: Tensor, normed: Tensor
) -> None:
    """States of a squeezed pass to where a round has them, and as they are for the choice."""
    own = shape.count * (shape.num_drafts + 1)
    places = batch.packed.places[:own]
    batch.packed.normed[: shape.rows] = normed
    batch.normed[:own] = normed[places]
    if model.feeds_stream:
        batch.stream[:own] = stream[places]


def run_choice(model: RoundModel, batch: DecodeBatch, shape: ChoiceShape) -> None:
    """The trunk's choices, the leading drafts that equal them, and what goes to the host."""
    count, rows = shape.count, shape.num_drafts + 1
    lengths, pending = batch.lengths[:count], batch.pending[:count]
    settings, emitted = batch.settings.first(count), batch.emitted[:count]
    normed, drafts = batch.normed[: count * rows], batch.ids[:count, 1:rows]
    lm_head = model.trunk.lm_head
    logits, limits = None, batch.drafted[:count]
    if not (shape.is_processed or shape.has_logprobs or model.kernels.always_processes):
        noise = noise_rows(lengths, settings.inv_temps, settings.seeds, rows)
        if shape.packed:
            packed, places = batch.packed, batch.packed.places[: count * rows]
            own = (each[packed.sources[: shape.packed]] for each in noise)
            choices = model.kernels.choose(packed.normed[: shape.packed], lm_head, *own)[places]
        else:
            choices = model.kernels.choose(normed, lm_head, *noise)
    else:
        positions = noise_rows(lengths, settings.inv_temps, settings.seeds, rows)[2]
        logits = model.kernels.logits(normed, lm_head)
        masks = batch.masks[: count * rows] if shape.has_masks else None
        adjusted = adjust(
            logits, settings, positions, drafts=drafts, masks=masks,
            processes=shape.is_processed, copies=False,
        )  # fmt: skip
        choices = draw(adjusted, settings)
        if shape.rejects:
            limits = _reject(model, batch, shape, adjusted, choices)
    accept(
        drafts, choices.view(count, rows), limits, lengths, batch.left[:count], pending,
        batch.tokens[:count], emitted, has_read=shape.has_read or model.head is None,
    )  # fmt: skip
    if logits is not None:
        remember(settings, emitted)
        if shape.has_logprobs:
            raw = adjusted
            if shape.is_processed:
                raw = adjust(logits, settings, positions, processes=False)
            values, ids = logprobs_of(raw, adjusted, settings, choices)
            batch.logprobs[: count * rows], batch.logprob_ids[: count * rows] = values, ids
    if batch.recurrent is not None:
        batch.recurrent.replays[:count] = emitted[:, 0]  # to be repeated next time
    if model.head is not None:
        states = (batch.stream if model.feeds_stream else batch.normed)[: count * rows]
        keep_states(
            states.view(count, rows, -1), batch.states[:count], model.boundary[:, 0], lengths,
            pending, emitted, batch.tables[:count], model.block_size,
        )  # fmt: skip


def _reject(
    model: RoundModel, batch: DecodeBatch, shape: ChoiceShape, adjusted: Adjusted, choices: Tensor
) -> Tensor:
    """The rejection rule: how many drafts are accepted [B]; `choices` become what is emitted.

    What a rejected draft was drawn from is computed once more, from the state that gave it.
    """
    count, settings = shape.count, batch.settings.first(shape.count)
    drafts = batch.ids[:count, 1 : shape.num_drafts + 1]
    limits, lengths = batch.drafted[:count], batch.lengths[:count]
    at = limits, batch.made[1, :count], batch.left[:count], lengths
    target = shares_of(adjusted, settings)
    accepted = accept_drafts(target, settings, drafts, batch.draft_shares[:count], *at)
    if not shape.vocabs:  # all drafts were copied
        follow(target, target, settings, drafts, accepted, choices.view(count, -1), *at, None)
    depth = accepted.long().clamp(0, shape.num_drafts - 1)
    normed = batch.draft_normed[torch.arange(count, device=depth.device), depth]
    slots = None if batch.own is None else batch.own.first(count)
    for number in shape.vocabs:
        tokens = model.drafting[number]
        for module in range(len(tokens.lm_heads)):
            own = batch.of_vocab(settings, number)
            if len(tokens.lm_heads) > 1:  # those whose rejected draft this module made
                own = batch.only(own, depth.clamp_max(len(tokens.lm_heads) - 1) == module)
            drawn = adjusted_drafts(
                model, batch, tokens, own, normed, lengths.long() + depth, module=module
            )
            follow(
                target, shares_of(drawn, own), own, drafts, accepted, choices.view(count, -1),
                *at, tokens.columns_with(slots),
            )  # fmt: skip
    return accepted
