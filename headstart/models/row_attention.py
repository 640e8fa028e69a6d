"""Attention of some rows over the keys and values that they see, so many at a time as fit.

The last keys are the rows' own. A row sees those up to its own, the near ones of a window, or a
choice.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

# In the mask of one product. A long prompt's would be gigabytes, and while those are given back to
# the system no other thread, as a server's event loop, gets memory from it.
_MASK_VALUES = 1 << 23


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [rows, heads, dim], the last of keys and values [n, kv_heads, dim] being the rows' own.

    [rows, heads, dim of values]; so many rows at a time that their mask stays small.
    """
    rows, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    step = max(1, _MASK_VALUES // (length * (heads // kv_heads)))
    if rows <= step:
        return _attend(q, keys, values, window, sinks)
    parts = []
    for at in range(0, rows, step):
        seen = length - rows + at + step  # more than there are, for the last
        parts.append(_attend(q[at : at + step], keys[:seen], values[:seen], window, sinks))
    return torch.cat(parts)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The last keys are the rows' own. Heads that share a K/V head are rows of one product."""
    rows, heads, dim = q.shape
    length, kv_heads, _ = keys.shape
    if window is not None and length > window + rows - 1:
        cut = length - (window + rows - 1)
        keys, values, length = keys[cut:], values[cut:], length - cut
    group = heads // kv_heads
    grouped = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    mask = _mask(rows, length, window, q) if rows > 1 else None
    if sinks is not None:  # one more key, whose score is the sink's and whose value is nothing
        keys, values = (
            torch.cat([part, part.new_zeros(1, *part.shape[1:])]) for part in (keys, values)
        )
        seen = q.new_zeros(rows, length) if mask is None else mask
        by_head = sinks.to(q.dtype).view(1, kv_heads, group, 1, 1).expand(-1, -1, -1, rows, -1)
        mask = torch.cat([seen.expand(1, kv_heads, group, rows, length), by_head], dim=-1)
        mask = mask.flatten(2, 3)
    elif mask is not None:
        mask = mask.expand(group, rows, length).reshape(1, group * rows, length)
    result = scaled_dot_product_attention(
        grouped.reshape(1, kv_heads, group * rows, dim),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
    )
    return result.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)


def _mask(rows: int, length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive [rows, length]: a row sees all but the rows after it; with a window, near ones."""
    slots = torch.arange(length, device=like.device)
    last = torch.arange(length - rows, length, device=like.device)[:, None]
    allowed = slots <= last
    if window is not None:
        allowed &= slots > last - window
    mask = torch.zeros(rows, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, float("-inf"))


def attend_chosen(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_rows` over the entries that each row may see: allowed [rows, n]."""
    rows, length = allowed.shape
    step = max(1, _MASK_VALUES // (length if sinks is None else length * len(sinks)))
    if rows <= step:
        return attend_allowed(q, keys, values, allowed, sinks)
    parts = []
    for at in range(0, rows, step):
        own, seen = slice(at, at + step), length - rows + at + step
        near = allowed[own, :seen]
        parts.append(attend_allowed(q[own], keys[:seen], values[:seen], near, sinks))
    return torch.cat(parts)


def attend_allowed(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with the whole mask in memory; entries may lie in any order."""
    mask = allowed
    if sinks is not None:  # as in `_attend`
        unseen = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
        by_head = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(q), 1)
        mask = torch.cat([unseen.expand(len(sinks), -1, -1), by_head], dim=-1)
        keys, values = (
            torch.cat([part, part.new_zeros(1, *part.shape[1:])]) for part in (keys, values)
        )
    shape = (1, q.shape[1], len(keys), -1)
    k, v = (part.transpose(0, 1).unsqueeze(0).expand(shape) for part in (keys, values))
    found = scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=mask)
    return found.squeeze(0).transpose(0, 1)
