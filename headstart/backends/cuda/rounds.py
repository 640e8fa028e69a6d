"""One round of all requests, from drafts to accepted tokens, without the host: `run_round`.

It has three parts. Drafts: the head reads what it has not read yet, which gives the first draft,
and goes on by itself for the others. Trunk: one pass over the newest token and the drafts. Choice:
the trunk's choices, and the leading drafts that equal them are accepted, or those that the
rejection rule lets pass. Only kernels, so a graph can hold each; parts hand over in tensors of the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.forward import Kernels, Rows, joined_rows
from headstart.backends.cuda.kernels.inputs import newest_rows, noise_rows
from headstart.backends.cuda.kernels.logprobs import logprobs_of
from headstart.backends.cuda.kernels.rejection import (
    accept_drafts,
    follow,
    share_of_drafts,
    shares_of,
)
from headstart.backends.cuda.kernels.rounds import (
    accept,
    chain_rows,
    head_rows,
    keep_states,
    trunk_rows,
)
from headstart.backends.cuda.kernels.sampling import Adjusted, Settings, adjust, draw, remember
from headstart.backends.cuda.recurrent import round_recur
from headstart.backends.cuda.shapes import ChoiceShape, DraftShape, RoundShape, TrunkShape
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import LayerStates
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class DraftTokens:
    """What drafts are chosen among."""

    lm_head: Linear  # N outputs
    ids: Tensor | None = None  # [N] where the draft vocabulary is reduced,
    columns: Tensor | None = None  # and [V] where it has each token, -1: nowhere


@dataclass(frozen=True)
class RoundModel:
    """What a round runs: weights, K/V memory, and the rows of the LM head that draft."""

    trunk: Trunk
    head: MTPHead | None
    caches: list[LayerCache]
    head_cache: LayerCache | None
    boundary: Tensor  # [blocks, D]: the state that the slot after each block needs
    block_size: int
    drafting: list[DraftTokens]  # by number, as requests ask for them
    max_context: int
    kernels: Kernels = field(default_factory=Kernels)
    states: list[LayerStates] = field(default_factory=list)  # of the recurrent layers

    @property
    def feeds_stream(self) -> bool:
        """Whether the head is fed with what comes before the final norm."""
        return self.head is not None and self.head.layout.trunk_hidden == "before_final_norm"


def run_round(model: RoundModel, batch: DecodeBatch, shape: RoundShape) -> None:
    """One round, launched and not waited for."""
    run_drafts(model, batch, shape.drafts)
    run_trunk(model, batch, shape.trunk)
    run_choice(model, batch, shape.choice)


def run_drafts(model: RoundModel, batch: DecodeBatch, shape: DraftShape) -> None:
    """Fill `batch.ids` with the newest token of each request and its drafts."""
    assert shape.head_rows or not shape.num_drafts
    ids = batch.ids[: shape.count]
    last = (batch.pending[: shape.count].long() - 1).clamp_min(0)
    ids[:, 0] = batch.tokens[: shape.count].gather(1, last[:, None]).squeeze(1)
    for depth, drafts in enumerate(_drafts(model, batch, shape), 1):
        ids[:, depth] = drafts


@dataclass(frozen=True)
class OtherRows:
    """Rows of requests that are not in rounds, such as prompts: token ids [M], and where."""

    ids: Tensor
    rows: Rows


def run_trunk(
    model: RoundModel, batch: DecodeBatch, shape: TrunkShape, others: OtherRows | None = None
) -> tuple[Tensor, Tensor]:
    """One pass over newest tokens and drafts, whose states are left in the batch.

    Rows of others come behind them: their states before and after the final norm.
    """
    count, rows = shape.count, shape.num_drafts + 1
    tables = batch.tables[:count]
    positions, kv_slots, seen = trunk_rows(
        batch.lengths[:count], batch.left[:count], batch.limits[:count], tables, model.block_size,
        rows,
    )  # fmt: skip
    where = _rows(model, positions, kv_slots, seen, tables, rows, first_slot=0)
    if batch.recurrent is not None:
        recur = round_recur(model.kernels, batch.recurrent, model.states, seen, rows)
        where = replace(where, recur=recur)
    ids = batch.ids[:count, :rows].flatten().contiguous()  # a single column would stay a view
    if others is not None:
        ids, where = torch.cat([ids, others.ids]), joined_rows(where, others.rows)
    stream, normed = model.kernels.trunk(model.trunk, ids, where, model.caches)
    own = count * rows
    batch.normed[:own] = normed[:own]
    if model.feeds_stream:
        batch.stream[:own] = stream[:own]
    return stream[own:], normed[own:]


def run_choice(model: RoundModel, batch: DecodeBatch, shape: ChoiceShape) -> None:
    """The trunk's choices, the leading drafts that equal them, and what goes to the host."""
    count, rows = shape.count, shape.num_drafts + 1
    lengths, pending = batch.lengths[:count], batch.pending[:count]
    settings, emitted = batch.settings.first(count), batch.emitted[:count]
    normed, drafts = batch.normed[: count * rows], batch.ids[:count, 1:rows]
    lm_head = model.trunk.lm_head
    logits, limits = None, batch.limits[:count]
    if not (shape.is_processed or shape.has_logprobs or model.kernels.always_processes):
        noise = noise_rows(lengths, settings.inv_temps, settings.seeds, rows)
        choices = model.kernels.choose(normed, lm_head, *noise)
    else:
        positions = noise_rows(lengths, settings.inv_temps, settings.seeds, rows)[2]
        logits = model.kernels.logits(normed, lm_head)
        masks = batch.masks[: count * rows] if shape.has_masks else None
        adjusted = adjust(logits, settings, positions, drafts=drafts, masks=masks)
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
            raw = adjust(logits, settings, positions, processes=False)
            values, ids = logprobs_of(raw, adjusted, settings, choices)
            batch.logprobs[: count * rows], batch.logprob_ids[: count * rows] = values, ids
    if batch.recurrent is not None:
        batch.recurrent.replays[:count] = emitted[:, 0]  # to be repeated next time
    if model.head is not None:
        states = (batch.stream if model.feeds_stream else batch.normed)[: count * rows]
        keep_states(
            states.view(count, rows, -1), batch.states[:count], model.boundary, lengths, pending,
            emitted, batch.tables[:count], model.block_size,
        )  # fmt: skip


def _drafts(model: RoundModel, batch: DecodeBatch, shape: DraftShape) -> list[Tensor]:
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
    drafts = [_guess(model, batch, shape, normed, 0)]
    for depth in range(2, shape.num_drafts + 1):
        positions, kv_slots, seen = chain_rows(
            lengths, left, limits, tables, model.block_size, depth
        )
        where = _rows(model, positions, kv_slots, seen, tables, 1, first_slot=1)
        normed, recycled = model.kernels.head(
            module, drafts[-1][:, None], recycled[:, None], where, embed, rotary, model.head_cache
        )
        drafts.append(_guess(model, batch, shape, normed, depth - 1))
    return drafts


def _guess(
    model: RoundModel, batch: DecodeBatch, shape: DraftShape, normed: Tensor, ahead: int
) -> Tensor:
    """[B] drafts of the tokens `ahead` behind the end, with the noise of the trunk's choice."""
    count, settings = shape.count, batch.settings.first(shape.count)
    noise = noise_rows(batch.lengths[:count], settings.inv_temps, settings.seeds, 1, ahead)
    if shape.rejects:
        batch.draft_normed[:count, ahead] = normed
    drafts: Tensor | None = None
    for number in shape.vocabs:
        tokens = model.drafting[number]
        if shape.is_processed or shape.rejects:
            adjusted = _adjusted_drafts(model, tokens, settings, normed, noise[2])
            # Where nothing is allowed any token will do.
            columns = draw(adjusted, settings).clamp(0, adjusted.values.shape[1] - 1)
            found = columns if tokens.ids is None else tokens.ids[columns]
            if shape.rejects:
                own = batch.of_vocab(settings, number)
                shares = share_of_drafts(shares_of(adjusted, own), own, columns)
                kept = batch.draft_shares[:count, ahead]
                batch.draft_shares[:count, ahead] = _either(kept, shares, batch, number)
        else:
            found = model.kernels.choose(normed, tokens.lm_head, *noise, tokens.ids)
        drafts = found if drafts is None else _either(drafts, found, batch, number)
    assert drafts is not None
    return drafts


def _either(drafts: Tensor, found: Tensor, batch: DecodeBatch, number: int) -> Tensor:
    """Of requests that draft from this vocabulary what was found there."""
    return torch.where(batch.vocabs[: len(drafts)] == number, found, drafts)


def _adjusted_drafts(
    model: RoundModel, tokens: DraftTokens, settings: Settings, normed: Tensor, positions: Tensor
) -> Adjusted:
    logits = model.kernels.logits(normed, tokens.lm_head)
    return adjust(logits, settings, positions, token_ids=tokens.ids, penalises=False)


def _reject(
    model: RoundModel, batch: DecodeBatch, shape: ChoiceShape, adjusted: Adjusted, choices: Tensor
) -> Tensor:
    """The rejection rule: how many drafts are accepted [B]; `choices` become what is emitted.

    What a rejected draft was drawn from is computed once more, from the state that gave it.
    """
    count, settings = shape.count, batch.settings.first(shape.count)
    drafts = batch.ids[:count, 1 : shape.num_drafts + 1]
    at = batch.limits[:count], batch.left[:count], batch.lengths[:count]
    target = shares_of(adjusted, settings)
    accepted = accept_drafts(target, settings, drafts, batch.draft_shares[:count], *at)
    depth = accepted.long().clamp(0, shape.num_drafts - 1)
    normed = batch.draft_normed[torch.arange(count, device=depth.device), depth]
    for number in shape.vocabs:
        tokens, own = model.drafting[number], batch.of_vocab(settings, number)
        drawn = _adjusted_drafts(model, tokens, own, normed, at[2].long() + depth)
        follow(
            target, shares_of(drawn, own), own, drafts, accepted, choices.view(count, -1), *at,
            tokens.columns,
        )  # fmt: skip
    return accepted


def _read(
    model: RoundModel, tokens: Tensor, states: Tensor, lengths: Tensor, left: Tensor,
    pending: Tensor, tables: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The head reads tokens [B, R] with their states [B, R, D], of which `pending` [B] count."""
    assert model.head is not None and model.head_cache is not None
    rows = tokens.shape[1]
    positions, kv_slots, seen = head_rows(lengths, left, pending, tables, model.block_size, rows)
    where = _rows(model, positions, kv_slots, seen, tables, rows, first_slot=1)
    return model.kernels.head(
        model.head.module(1), tokens, states, where, model.trunk.embed, model.trunk.rotary,
        model.head_cache,
    )  # fmt: skip


def _rows(
    model: RoundModel, positions: Tensor, kv_slots: Tensor, seen: Tensor, tables: Tensor, rows: int,
    *, first_slot: int,
) -> Rows:  # fmt: skip
    """`rows` new rows of each request."""
    own: dict[str, int] = {
        "block_size": model.block_size, "max_context": model.max_context, "first_slot": first_slot,
    }  # fmt: skip
    attend = model.kernels.paged(tables, seen, rows, **own)
    latent = model.kernels.paged_latent(tables, seen, rows, **own)
    return Rows(positions, kv_slots, attend, latent=latent)
