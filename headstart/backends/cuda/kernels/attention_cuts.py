"""How contexts are cut up for attention, and what a program has room for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.shared_prefix import LINES

# Of one program's queries, by the bytes of a number: 128 lines of 256. Twice as many need more
# shared memory than there is, and more than 256 lines, however short, more registers.
_TILE_VALUES = {2: 128 * 256, 4: 64 * 128}
_MOST_LINES = 256


@dataclass(frozen=True)
class Cut:
    """How contexts are cut up: into how many pieces, tokens per step, warps, stages."""

    pieces: int = 0  # at most; fewer where they would have less than `least` tokens,
    least: int = 1
    levels: int = 0  # or less than a usual context in so many pieces: longer ones have more
    tokens: int = 0  # of a piece, where that is fixed
    step: int = 64
    warps: int = 4
    stages: int = 2
    registers: int | None = None  # of a thread at most; None: as many as the compiler likes
    lines: int = 0  # of a program, in latent attention; 0: as many as fit

    def __post_init__(self) -> None:
        assert (self.pieces > 0) != (self.tokens > 0)


def fitted(cut: Cut, lines: int, dim: int, number_bytes: int, *, is_fp8: bool = False) -> Cut:
    """`cut` for a program with `lines` queries of size `dim`, so that its numbers have room.

    Chosen by the registers and spills that the compiler reports for an H100, not by time: what was
    measured had heads of 128 and few lines. compile_kernels.py of its tests looks at them.
    """
    if cut.registers is not None and (number_bytes > 2 or lines > 16 or dim > 128):
        # More numbers than so few registers hold: they are fewer in shorter steps.
        cut = replace(cut, registers=None, step=32, stages=4)
    if is_fp8 and number_bytes == 2:  # both halves of keys and values go through registers
        cut = replace(cut, registers=None, step=min(cut.step, 64))
    if number_bytes > 2:  # products of fp32 keep both sides in registers
        return replace(cut, step=min(cut.step, 32), warps=8)
    step = min(cut.step, 64) if dim > 128 or lines >= 256 else cut.step
    return replace(cut, step=step, warps=8 if lines * dim > 64 * 128 else cut.warps)


def rows_fitting(group: int, dim: int, number_bytes: int) -> int:
    """Rows of a request that one program has room for: `group` query heads of size `dim` each."""
    return max(1, min(_MOST_LINES, _TILE_VALUES[number_bytes] // dim) // group)


def tile_of(rows: int, group: int) -> int:
    """Lines of a program for `rows` rows of one request, `group` query heads each."""
    return max(16, int(triton.next_power_of_2(rows * group)))


def neighbours_of(rows: int, group: int) -> int:
    """Requests that one program attends for where their contexts begin alike; 1: none do."""
    return max(1, LINES // tile_of(rows, group))


def usual_context(seen: Tensor, cut: Cut) -> Tensor | None:
    """Tokens that a piece has at least, int32 [1], for a cut that levels: of a context a quarter
    above the mean, in `levels` pieces.

    Where contexts are alike each has as many programs as fill the GPU, one where many requests do,
    which reads fastest; where some are far longer, those few would run long after all others have
    ended. Computed once for all layers of a pass.
    """
    if not cut.levels:
        return None
    result = torch.empty(1, dtype=torch.int32, device=seen.device)
    _usual_context[(1,)](
        seen, result, seen.shape[0], LEAST=cut.least, LEVELS=cut.levels,
        BLOCK=triton.next_power_of_2(seen.shape[0]), num_warps=1,
    )  # fmt: skip
    return result


@jit
def _usual_context(seen, result, count, LEAST: tl.constexpr, LEVELS: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
    first = tl.load(seen + at, at < count, -1)
    total = tl.sum(tl.maximum(first, 0), 0)
    requests = tl.maximum(tl.sum((first >= 0).to(tl.int32), 0), 1)
    tl.store(result, tl.maximum(total // requests * 5 // (4 * LEVELS), LEAST))
