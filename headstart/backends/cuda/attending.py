"""How rows of rounds attend over the paged cache: cuts of contexts, and what requests share.

What is the same for all layers of a pass is found once, when the pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from headstart.backends.cuda.kernels import shared_prefix
from headstart.backends.cuda.kernels.attention import Packed, paged_attention
from headstart.backends.cuda.kernels.attention_cuts import Cut, neighbours_of, usual_context
from headstart.models.attention import LayerCache

LEAST_SHARING = 33  # requests of a round from which on shared beginnings of contexts are read once
GROUP_ROWS = 32  # of a prompt that attend together where it joins a round
# Of requests with many rows among others with few: pieces of theirs must fill the GPU.
COPYING = Cut(pieces=8, least=128, levels=4, step=64, warps=8, stages=2)


@dataclass(frozen=True)
class Sight:
    """What the rows of a layer see: so many tokens, themselves included, or all (None).

    sinks [H]: a further score of each head, with nothing behind it.
    """

    window: int | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether rows see all tokens and nothing else."""
        return self.window is None and self.sinks is None


EVERYTHING = Sight()
Attend = Callable[[Tensor, LayerCache, Sight], Tensor]  # q [M, H, D] -> [M, H * V]


def paged(
    tables: Tensor, seen: Tensor, rows: int, *, block_size: int, max_context: int,
    first_slot: int,
) -> Attend:  # fmt: skip
    """How `rows` new rows of each request attend: `paged_attention`."""
    requests, cut = seen.shape[0], cut_for(seen.shape[0], rows)
    usual = usual_context(seen, cut)
    sharing = Sharing(tables, seen, rows, block_size, max_context)

    def attend(q: Tensor, cache: LayerCache, sight: Sight) -> Tensor:
        result = paged_attention(
            q.view(requests, rows, *q.shape[1:]), cache.k, cache.v, tables, seen,
            block_size=block_size, max_context=max_context, cut=cut, first_slot=first_slot,
            usual=usual, shared=sharing.lengths(q, cache, sight), sizes=cache.sizes,
            window=sight.window, sinks=sight.sinks,
        )  # fmt: skip
        return result.view(requests * rows, -1)

    return attend


def packed(
    parts: Sequence[tuple[Tensor, Tensor, Packed]], *, block_size: int, max_context: int
) -> Attend:
    """How rows of a packed pass attend, in parts: tables, slots seen, and which rows."""
    cuts = [
        COPYING if rows.is_sparse else cut_for(seen.shape[0], rows.rows) for _, seen, rows in parts
    ]
    usual = [usual_context(seen, cut) for (_, seen, _), cut in zip(parts, cuts, strict=True)]
    sharing = [
        Sharing(tables, seen, rows.rows if rows.starts is None else 0, block_size, max_context)
        for tables, seen, rows in parts
    ]

    def attend(q: Tensor, cache: LayerCache, sight: Sight) -> Tensor:
        for (tables, seen, rows), cut, own, shared in zip(parts, cuts, usual, sharing, strict=True):
            result = paged_attention(
                q, cache.k, cache.v, tables, seen, block_size=block_size,
                max_context=max_context, cut=cut, packed=rows, usual=own,
                shared=shared.lengths(q, cache, sight), sizes=cache.sizes, window=sight.window,
                sinks=sight.sinks,
            )  # fmt: skip
        return result.flatten(1)

    return attend


class Sharing:
    """What decoding requests share of their contexts, found once for all layers of a pass.

    `rows` of each request; 0: rows of prompts, for which it is not looked up.
    """

    def __init__(
        self, tables: Tensor, seen: Tensor, rows: int, block_size: int, max_context: int
    ):  # fmt: skip
        self._tables, self._seen, self._rows, self._page = tables, seen, rows, block_size
        self._most = max_context
        self._found: dict[int, Tensor] = {}  # by neighbours

    def lengths(self, q: Tensor, cache: LayerCache, sight: Sight) -> Tensor | None:
        """`shared_lengths`, or None where reading once would save nothing."""
        neighbours = neighbours_of(self._rows, q.shape[-2] // cache.k.shape[1])
        is_plain = self._rows > 0 and cache.sizes is None  # no rows of prompts, no 8-bit K/V
        is_plain = is_plain and self._most > shared_prefix.LEAST
        is_plain = is_plain and sight.window is None and cache.k.shape == cache.v.shape
        if not is_plain or neighbours == 1 or len(self._seen) < LEAST_SHARING:
            return None
        if neighbours not in self._found:
            self._found[neighbours] = shared_prefix.shared_lengths(
                self._tables, self._seen, neighbours, block_size=self._page
            )
        return self._found[neighbours]


def cut_for(requests: int, rows: int) -> Cut:
    """The fastest cut on an H200, with heads of 128: many pieces where few must fill the GPU."""
    if rows >= GROUP_ROWS:  # groups of a prompt: few of them are those of many cached tokens
        if requests <= 8:
            return Cut(pieces=8, least=512, step=64, warps=8, stages=2)
        if requests <= 16:
            return Cut(pieces=8, least=1024, step=64, warps=8, stages=3)
        return Cut(pieces=4, least=1024, step=32, warps=8, stages=4)
    if requests <= 2:
        return Cut(pieces=32, least=128, step=128, warps=4, stages=1)
    if requests <= 4:
        return Cut(pieces=16, least=192, step=64, warps=4, stages=3)
    if 8 < requests <= 16:  # about four programs of a usual context for each processor
        return Cut(pieces=8, least=256, levels=4, step=64, warps=4, stages=3)
    if requests <= 32:
        return Cut(pieces=8, least=256 if requests <= 8 else 512, step=64, warps=4, stages=3)
    if rows > 2:
        # Triton 3.6 would take 128 registers, so that a processor has room for 4 programs; where it
        # has room for 5, 80 requests with 8 key/value heads run all at once.
        return Cut(
            pieces=8, least=768, levels=1, step=64, warps=4, stages=2, registers=96
        )  # fmt: skip
    return Cut(pieces=8, least=768, levels=1, step=64, warps=4, stages=2)
