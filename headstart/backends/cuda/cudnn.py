"""Attention of one prompt by cuDNN, in few shapes.

cuDNN makes a plan for every shape it meets, which takes longer than the attention of a prompt, and
its causal mask begins at the first key. So rows are filled up to sizes of a short list and attend
to themselves in a square; what lies before the square is seen whole, in pieces whose sizes are
powers of two, and merged in. Where the earlier context does not end at such a size, its last rows
join the square: what they see is not used.

n rows, L slots of their context, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.backends.cuda.kernels.merging import merge_results

STEP = 512  # the smallest piece of earlier context
_LONGEST_PIECE = 8192
_SIZES = 8  # squares between a power of two and the next; filling one up wastes 6 % on average
_COARSEST = 512  # between squares of any size


def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, H, D], k and v [L, G, D] -> [n, H, D]; the last row sees all L."""
    rows, before = q.shape[0], k.shape[0] - q.shape[0]
    edge = before // STEP * STEP
    ahead = before - edge
    blank = square_size(ahead + rows) - ahead - rows
    queries = _filled(q, ahead, blank)
    keys, values = (_filled(x[edge:], 0, blank) for x in (k, v))
    result, sums = _attend(queries, keys, values, is_causal=True)
    start = 0
    for size in piece_sizes(edge):
        piece = slice(start, start + size)
        other, other_sums = _attend(queries, k[piece], v[piece], is_causal=False)
        merge_results(result, sums, other, other_sums)
        start += size
    return result[ahead : ahead + rows]


def square_size(rows: int) -> int:
    """The smallest size in use that holds so many rows."""
    below = 1 << max(0, (rows - 1).bit_length() - 1)
    unit = min(_COARSEST, max(1, below // _SIZES))
    return -(-rows // unit) * unit


def piece_sizes(slots: int) -> list[int]:
    """How a multiple of STEP is cut."""
    longest = min(_LONGEST_PIECE, 1 << slots.bit_length() >> 1)
    if not slots:
        return []
    return [longest, *piece_sizes(slots - longest)]


def _filled(rows: Tensor, ahead: int, behind: int) -> Tensor:
    """[n, H, D] with blank rows around. Zeros: a masked NaN would still spoil a product."""
    return pad(rows, (0, 0, 0, 0, ahead, behind)) if ahead or behind else rows


def _attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """What [n, H, D] queries see, and the log-sum-exps [H, n] of their scores."""
    if q.is_cuda:
        result, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), None, True, 0.0, is_causal
        )
    else:  # for tests: the same shapes through PyTorch's own kernel
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), 0.0, is_causal
        )
    return result[0].transpose(0, 1).contiguous(), sums.reshape(q.shape[1], q.shape[0]).contiguous()
