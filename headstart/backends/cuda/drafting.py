"""The first part of a round: the head reads what it has not read yet, and drafts.

Every module reads the pending tokens of each request, which makes its K/V final there. Module j
goes on with the j drafts that are known by then, which gives draft j + 1; beyond its last module a
head goes on with that one on its own output. What rows of drafts write is temporary.

B requests, R pending rows at most, D width. Module j at slot i is fed with what module j - 1 gave
at slot i - 1 (Step-3.5), or was fed with there, where all are fed with the trunk's states (MiMo-V2:
so with one that is a slot further back). For the first pending token that is what the batch carries
from the round before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.kernels.adjusting import Adjusted, Settings, adjust
from headstart.backends.cuda.kernels.copies import follow_copies
from headstart.backends.cuda.kernels.inputs import newest_rows, noise_rows
from headstart.backends.cuda.kernels.own_rows import add_own, choose_with_own, own_logits
from headstart.backends.cuda.kernels.rejection import share_of_drafts, shares_of
from headstart.backends.cuda.kernels.rounds import chain_rows, head_rows, keep_boundaries
from headstart.backends.cuda.kernels.sampling import draw
from headstart.backends.cuda.round_model import DraftTokens, RoundModel
from headstart.backends.cuda.shapes import DraftShape


def run_drafts(model: RoundModel, batch: DecodeBatch, shape: DraftShape) -> None:
    """Fill `batch.ids` with the newest token of each request and its drafts."""
    assert shape.head_rows or not shape.num_drafts
    ids = batch.ids[: shape.count]
    last = (batch.pending[: shape.count].long() - 1).clamp_min(0)
    ids[:, 0] = batch.tokens[: shape.count].gather(1, last[:, None]).squeeze(1)
    if shape.head_rows and model.head is not None:
        _add_own(model, batch, shape)
        recycled = _read(model, batch, shape)
        for depth in range(model.head.num_modules + 1, shape.num_drafts + 1):
            recycled = _chain(model, batch, shape, recycled, depth)
    if batch.copies is not None:
        count = shape.count
        follow_copies(
            batch.copies, batch.tokens[:count], batch.pending[:count], batch.lengths[:count],
            batch.limits[:count], ids, batch.made, of_head=shape.num_drafts, columns=shape.columns,
        )  # fmt: skip


def _add_own(model: RoundModel, batch: DecodeBatch, shape: DraftShape) -> None:
    """What the head reads now becomes the requests' own tokens, beside their vocabularies."""
    if batch.own is None:
        return
    count = shape.count
    for number in shape.vocabs:
        columns = model.drafting[number].columns
        if columns is not None:
            add_own(
                batch.own.first(count), batch.tokens[:count, : shape.head_rows],
                batch.pending[:count], batch.lengths[:count], columns, batch.vocabs[:count], number,
            )  # fmt: skip


def _read(model: RoundModel, batch: DecodeBatch, shape: DraftShape) -> Tensor:
    """All modules read and draft; what the last one recycles [B, D] after its draft."""
    assert model.head is not None
    count, rows, ids = shape.count, shape.head_rows, batch.ids[: shape.count]
    pending, tables = batch.pending[:count], batch.tables[:count]
    lengths, at = batch.lengths[:count], (batch.left[:count], batch.limits[:count])
    tokens, states = batch.tokens[:count, :rows], batch.states[:count, :rows]
    for module in range(model.head.num_modules):
        drafts = module if module < shape.num_drafts else 0  # that it reads after the tokens
        placed = head_rows(
            lengths, pending, tables, model.block_size, rows + drafts, module, drafts, *at
        )
        where = model.rows(placed, tables, rows + drafts, first_slot=module + 1)
        normed, recycled = model.kernels.head(
            model.head.module(module + 1), _with_drafts(tokens, pending, ids[:, 1 : drafts + 1]),
            states, where, model.trunk.embed, model.trunk.rotary, model.head_caches[module],
        )  # fmt: skip
        last, newest = newest_rows(normed, recycled, pending, after=drafts)
        if module < shape.num_drafts:  # only the last row guesses
            ids[:, module + 1] = _guess(model, batch, shape, last, module + 1)
        if module + 1 < model.head.num_modules:
            is_parallel = model.head.layout.topology == "parallel"
            given = states if is_parallel else recycled.view(count, -1, recycled.shape[-1])
            states = _feed_next(model, batch, shape, module, given.contiguous())
    return newest


def _with_drafts(tokens: Tensor, pending: Tensor, drafts: Tensor) -> Tensor:
    """Tokens [B, R], of which `pending` [B] count, and drafts [B, J] right after those."""
    if drafts.shape[1] == 0:
        return tokens
    at = torch.arange(tokens.shape[1] + drafts.shape[1], device=tokens.device)
    ahead = (at - pending[:, None]).clamp_(0, drafts.shape[1] - 1)
    own = at.clamp_max(tokens.shape[1] - 1).expand_as(ahead)
    is_draft = at >= pending[:, None]
    return torch.where(is_draft, drafts.gather(1, ahead), tokens.gather(1, own))


def _feed_next(
    model: RoundModel, batch: DecodeBatch, shape: DraftShape, module: int, states: Tensor
) -> Tensor:
    """States [B, ..., D] of the next module's rows, each a slot behind; those to come are kept."""
    count, pending = shape.count, batch.pending[: shape.count]
    carried, flat = batch.carried[:count, module], states.flatten(0, 1)
    rows = shape.head_rows + (module + 1 if module + 1 < shape.num_drafts else 0)
    fed = torch.cat([carried[:, None], states], dim=1)[:, :rows]
    keep_boundaries(
        states, model.boundary[:, module + 1], batch.lengths[:count], batch.left[:count], pending,
        batch.tables[:count], model.block_size,
    )  # fmt: skip
    batch.carried[:count, module] = newest_rows(flat, flat, pending)[0]
    return fed


def _chain(
    model: RoundModel, batch: DecodeBatch, shape: DraftShape, recycled: Tensor, depth: int
) -> Tensor:
    """The draft of `depth` by the last module on its own output [B, D]; what it recycles."""
    assert model.head is not None
    count, tables, last = shape.count, batch.tables[: shape.count], model.head.num_modules
    placed = chain_rows(
        batch.lengths[:count], batch.left[:count], batch.limits[:count], tables, model.block_size,
        depth, last - 1,
    )  # fmt: skip
    normed, recycled = model.kernels.head(
        model.head.module(depth), batch.ids[:count, depth - 1 : depth], recycled[:, None],
        model.rows(placed, tables, 1, first_slot=last), model.trunk.embed, model.trunk.rotary,
        model.head_caches[-1],
    )  # fmt: skip
    batch.ids[:count, depth] = _guess(model, batch, shape, normed, depth)
    return recycled


def _guess(
    model: RoundModel, batch: DecodeBatch, shape: DraftShape, normed: Tensor, depth: int
) -> Tensor:
    """[B] drafts of the tokens `depth` after the end, with the noise of the trunk's choice."""
    count, settings, ahead = shape.count, batch.settings.first(shape.count), depth - 1
    noise = noise_rows(batch.lengths[:count], settings.inv_temps, settings.seeds, 1, ahead)
    if shape.rejects:
        batch.draft_normed[:count, ahead] = normed
    drafts: Tensor | None = None
    for number in shape.vocabs:
        tokens = model.drafting[number]
        if shape.is_processed or shape.rejects:
            adjusted = adjusted_drafts(
                model, batch, tokens, settings, normed, noise[2], module=depth - 1
            )
            # Where nothing is allowed any token will do.
            columns = draw(adjusted, settings).clamp(0, adjusted.values.shape[1] - 1)
            found = adjusted.tokens_at(columns)
            if shape.rejects:
                own = batch.of_vocab(settings, number)
                shares = share_of_drafts(shares_of(adjusted, own), own, columns)
                kept = batch.draft_shares[:count, ahead]
                batch.draft_shares[:count, ahead] = _either(kept, shares, batch, number)
        else:
            found = model.kernels.choose(normed, tokens.lm_head(depth), *noise, tokens.ids)
        drafts = found if drafts is None else _either(drafts, found, batch, number)
    assert drafts is not None
    if batch.own is None or shape.is_processed or shape.rejects:
        return drafts
    return choose_with_own(normed, model.own_rows_of(depth), batch.own.first(count), drafts, *noise)


def _either(drafts: Tensor, found: Tensor, batch: DecodeBatch, number: int) -> Tensor:
    """Of requests that draft from this vocabulary what was found there."""
    return torch.where(batch.vocabs[: len(drafts)] == number, found, drafts)


def adjusted_drafts(
    model: RoundModel, batch: DecodeBatch, tokens: DraftTokens, settings: Settings, normed: Tensor,
    positions: Tensor, *, module: int,
) -> Adjusted:  # fmt: skip
    """What drafts are drawn from: processed, but for penalties, which are the trunk's.

    `module` of the head, from 0; those beyond the last count as that.
    """
    logits, ids = model.kernels.logits(normed, tokens.lm_head(module + 1)), tokens.ids
    if batch.own is not None and ids is not None:
        own = batch.own.first(len(normed))
        added = logits.new_zeros(len(logits), *own.ids.shape, dtype=torch.float32)
        added[0] = own_logits(normed, model.own_rows_of(module + 1), own)
        logits = torch.cat([logits, added], dim=2)
        ids = torch.cat([ids.expand(len(normed), -1), own.ids], dim=1)
    return adjust(logits, settings, positions, token_ids=ids, penalises=False)
