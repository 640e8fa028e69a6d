"""A head run from every row of known texts at once: what it would draft at depths 1 to K.

Depth k at row t consumes token t + k and predicts token t + k + 1, from the state of row t. The
first N depths are the head's N modules, each a causal pass over all rows. Beyond that the last
module goes on with its own output. In context `prefix` row t then sees what serving has: the
module's entries up to row t and its own chain. In context `sequence` (FastMTP's) it sees the
entries that every earlier row has at this depth.
"""

from __future__ import annotations

from typing import Literal

import torch

from headstart.models.documents import Chain, Documents, Passage
from headstart.models.grouped_attention import Attention
from headstart.models.layers import DecoderLayer
from headstart.models.mtp import MTPHead, MTPModule
from headstart.models.rope import RotaryTable
from headstart.models.streams import Joined
from headstart.models.trunk import Trunk

ChainContext = Literal["prefix", "sequence"]
StateKind = Literal["after_final_norm", "before_final_norm", "before_hc_head"]


def unroll(
    head: MTPHead,
    embedded: torch.Tensor,
    rotary: RotaryTable,
    states: torch.Tensor,
    documents: Documents,
    *,
    num_depths: int,
    context: ChainContext = "prefix",
    rows: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """States for the LM head, [T, D] for each depth; rows past a document's end mean nothing.

    embedded [T, D] are the rows' own tokens, states [T, D], or of all streams, what the head's
    layout asks for. rows [N], ascending: the only ones whose drafts are wanted. Others are zeros
    from the last module on where its block makes that possible, which saves their work.
    """
    positions = documents.positions(states.device)
    last = rotary.num_positions - 1
    if context == "sequence" or rows is None or not len(rows) or not _goes_on_by_row(head):
        rows = None
    passage = Passage(documents)
    chain = Chain(passage, rows)
    results, hidden = [], states
    for depth in range(1, num_depths + 1):
        repeats = max(0, depth - head.num_modules)
        if repeats == 0 or context == "sequence":
            # The modules before the last one make what it sees of every row.
            wanted = rows if depth == head.num_modules else None
            passage = Passage(documents, wanted)
            chain = Chain(passage, rows)
            sees: Passage | Chain = passage
        else:
            sees = chain
        given = (
            documents.ahead(embedded, depth),
            states if head.layout.topology == "parallel" and repeats == 0 else hidden,
            (positions + repeats).clamp_max(last),
        )
        if rows is None or (sees is passage and depth < head.num_modules):
            normed, recycled = head.module(depth)(*given, rotary, sees)
        else:
            if sees is passage:
                found = head.module(depth)(*given, rotary, sees, rows)
            else:
                found = head.module(depth)(*(each[rows] for each in given), rotary, sees)
            normed, recycled = (
                each.new_zeros(documents.num_rows, each.shape[1]).index_copy(0, rows, each)
                for each in found
            )
        results.append(normed)
        hidden = recycled
    return results


def _goes_on_by_row(head: MTPHead) -> bool:
    """Whether rows of the last module, which goes on by itself, need nothing of other rows but
    keys and values."""
    block = head.modules_[-1].block
    if type(block) is not DecoderLayer or type(head.modules_[-1]) is not MTPModule:
        return False
    # not of a class made from it, whose rows choose what they see
    return type(block.attention) is Attention and block.attention_streams is None


@torch.no_grad()
def trunk_states(
    trunk: Trunk, ids: torch.Tensor, documents: Documents, kind: StateKind
) -> torch.Tensor:
    """The frozen trunk over whole documents: [T, D], or of all streams, of the state that a head's
    layout names."""
    contexts = [Passage(documents) for _ in trunk.layers]
    stream = trunk(ids, documents.positions(ids.device), contexts)
    result = trunk.final_norm(stream) if kind == "after_final_norm" else stream
    if kind == "before_final_norm" and isinstance(trunk.final_norm, Joined):
        result = trunk.final_norm.joined(stream)
    assert isinstance(result, torch.Tensor)
    return result


@torch.no_grad()
def teacher_states(trunk: Trunk, states: torch.Tensor, kind: StateKind) -> torch.Tensor:
    """What the trunk's own LM head reads: the final norm is applied where it has not been."""
    result = states if kind == "after_final_norm" else trunk.final_norm(states)
    assert isinstance(result, torch.Tensor)
    return result
