"""A text that a trunk goes on with by itself, its most likely token each time."""

from __future__ import annotations

import torch

from headstart.models.attention import LayerCache, PagedContext, Span, empty_cache
from headstart.models.recurrence import SlotRecurrence, StateSpan, empty_states
from headstart.models.trunk import Trunk


def continued(trunk: Trunk, ids: list[int], count: int, max_len: int) -> list[int]:
    """The ids and up to `count` more."""
    config, device, dtype = trunk.config, trunk.embed.device, trunk.embed.dtype
    total = min(len(ids) + count, max_len)
    kept = [
        empty_states(config.delta, 1, dtype, device)
        if kind.mixer == "delta" and config.delta is not None
        else empty_cache(config.kept(kind), total, dtype, device)
        for kind in config.layers
    ]
    ids, done = list(ids), 0
    while len(ids) < total:
        rows = len(ids) - done
        span = Span(0, rows, slice(done, len(ids)), slice(0, len(ids)))
        state = StateSpan(0, rows, 0 if done else None, ((rows, 0),))
        stream = trunk(
            torch.tensor(ids[done:], device=device),
            torch.arange(done, len(ids), device=device),
            [
                PagedContext(own, [span])
                if isinstance(own, LayerCache)
                else SlotRecurrence(own, [state])
                for own in kept
            ],
        )
        done = len(ids)
        ids.append(int(trunk.logits(trunk.final_norm(stream[-1:])).argmax()))
    return ids
