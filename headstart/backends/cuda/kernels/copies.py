"""Drafts that the host found in a request's context, taken up by the round that runs.

The host is one round behind: a row of `copies` [B, 3 + W] holds tokens that would follow the text
as the host knew it. The round goes on where its own text is by now, if what came since agrees.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

# Of a row: place of its first token in the text, how many there are, whether the head must agree.
START, COUNT, CONFIRMED, TOKENS = 0, 1, 2, 3


def follow_copies(
    copies: Tensor, tokens: Tensor, pending: Tensor, lengths: Tensor, limits: Tensor, ids: Tensor,
    made: Tensor, *, of_head: int, columns: int,
) -> None:  # fmt: skip
    """Replace drafts ids [B, 1 + columns] by copied ones, and say how many there are.

    tokens [B, C], of which `pending` [B] are the newest of each text; made [2, B]: all drafts of a
    request, and those of the head among them.
    """
    count = ids.shape[0]
    block = triton.next_power_of_2(max(tokens.shape[1], columns, 1))
    _follow[(count,)](
        copies, tokens, pending, lengths, limits, ids, made, copies.stride(0), tokens.stride(0),
        ids.stride(0), made.stride(0), of_head, columns, BLOCK=block, num_warps=1,
    )  # fmt: skip


@jit(do_not_specialize=["of_head", "columns"])
def _follow(copies, tokens, pending, lengths, limits, ids, made, copy_stride, token_stride,
            id_stride, made_stride, of_head, columns, BLOCK: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    copy = copies + request.to(tl.int64) * copy_stride
    start = tl.load(copy)
    count = tl.load(copy + 1)
    needs_head = tl.load(copy + 2)
    unread = tl.load(pending + request).to(tl.int64)
    behind = tl.load(lengths + request).to(tl.int64) - start  # tokens that came since
    is_known = (count > 0) & (behind >= 0) & (behind <= unread) & (behind < count)
    since = row < tl.where(is_known, behind, 0)
    own = tl.load(tokens + request * token_stride + unread - behind + row, since, 0)
    there = tl.load(copy + 3 + row, since, 0)
    wrong = tl.sum(tl.where(since & (own != there), 1, 0), 0)
    head = tl.minimum(tl.load(limits + request), of_head)
    copied = tl.where(is_known & (wrong == 0), tl.minimum(count - behind, columns), 0)
    is_draft = row < copied
    value = tl.load(copy + 3 + behind + row, is_draft, 0)
    guess = tl.load(ids + request * id_stride + 1 + row, row < head, 0)
    refused = tl.sum(tl.where(is_draft & (row < head) & (guess != value), 1, 0), 0)
    agreed = tl.where((refused == 0) & (copied > head), head, 0)
    takes = (copied > 0) & ((needs_head == 0) | (agreed > 0))
    tl.store(
        ids + request * id_stride + 1 + row, value, is_draft & (row * 0 + takes.to(tl.int32) > 0)
    )
    tl.store(made + request, tl.where(takes, copied, head).to(tl.int32))
    tl.store(made + made_stride + request, tl.where(takes, agreed, head).to(tl.int32))
