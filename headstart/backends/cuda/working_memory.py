"""Memory that captured rounds take for their batch and their scratch, by formulas."""

from __future__ import annotations

from dataclasses import replace

import torch

from headstart.backends.cuda.decode_batch import WINDOW, DecodeBatch
from headstart.backends.cuda.kernels.attention_cuts import tile_of
from headstart.backends.cuda.kernels.shared_prefix import PIECES
from headstart.backends.cuda.packed import MOST_JOINED_ROWS
from headstart.backends.working_memory import (
    WorkingBytes,
    WorkSizes,
    activation_bytes,
    logit_bytes,
)
from headstart.models.build import LoadedModel

_CHOICE = 3  # arrays of logits: as they come, processed, and raw for log-probabilities
# Graphs share their scratch, but what a smaller round was captured with is not joined to what a
# larger one needs.
_CAPTURED = 2
_CUTS = 8  # pieces that the contexts of many requests have at most (`attending.cut_for`)


def _attention_bytes(model: LoadedModel, rows: int) -> int:
    """What pieces of a request's context leave until they are put together, in one layer."""
    shapes = [model.config.shape(kind) for kind in model.config.layers if kind.attends]
    return max(
        own.kv_heads * (_CUTS + PIECES) * tile_of(rows, own.heads // own.kv_heads)
        * (own.v_dim + 1) * 4
        for own in shapes
    )  # fmt: skip


def captured_bytes(model: LoadedModel, sizes: WorkSizes, *, joins: bool) -> WorkingBytes:
    """Of the rounds of one engine; `joins`: whether rows of prompts join them."""
    rounds = replace(sizes.rounds, max_requests=1)
    batch = DecodeBatch.for_rounds(
        rounds, model.config, window=WINDOW, block_size=sizes.block_size, dtype=model.dtype,
        device=torch.device("meta"), modules=0 if model.head is None else model.head.num_modules,
        packs=joins,
    )  # fmt: skip
    rows = rounds.num_drafts + 1
    widest = rows if model.head is None else batch.window  # a head that is late reads so many
    scratch = _CAPTURED * _CHOICE * logit_bytes(model, rows) + activation_bytes(model, widest)
    # Requests that copy have more rows in a squeezed pass.
    scratch += _attention_bytes(model, max(rows, rounds.copied + 1) if joins else rows)
    if model.config.mla is not None and model.config.mla.index is not None:
        context = batch.tables.shape[1] * sizes.block_size  # scores, and what was chosen
        scratch += rows * (context + model.config.mla.index.top_k) * 4
    fixed = 0
    if joins:
        fixed = batch.packed.num_bytes + activation_bytes(model, MOST_JOINED_ROWS)
        # Beside prompts, in a pass that they join; and what that pass leaves.
        scratch += activation_bytes(model, rows) + rows * batch.packed.row_bytes
        scratch += batch.packed.places.nbytes
    return WorkingBytes(fixed, batch.num_bytes + scratch)
