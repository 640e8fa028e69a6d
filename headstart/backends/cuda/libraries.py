"""Which library computes the attention of long prompts; short ones and all else stay with ours.

A library is taken when it gives what our own kernel gives, tried once at the start. `PREFERRED` is
the one place that says which are tried, and in which order.

cuDNN makes a plan for every shape it meets, which takes longer than the attention of a prompt, and
its causal mask begins at the first key. So rows are filled up to sizes of a short list and attend
to themselves in a square; what lies before the square is seen whole, in pieces whose sizes are
powers of two, and merged in. Where the earlier context does not end at such a size, its last rows
join the square: what they see is not used.

n rows, L slots of their context, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.backends.cuda.kernels.merging import merge_results
from headstart.backends.cuda.kernels.prompts import prompt_attention, tiles_of
from headstart.errors import first_line
from headstart.models.attention import MAX_GATHERED_SLOTS, LayerCache, Span

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


def _filled(rows: Tensor, before: int, after: int) -> Tensor:
    """[n, H, D] with blank rows around. Zeros: a masked NaN would still spoil a product."""
    return pad(rows, (0, 0, 0, 0, before, after)) if before or after else rows


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


_LOG = logging.getLogger(__name__)
_TRIED = (1800, 3400)  # rows and slots: filled up before and after, and two pieces of context
_TOLERANCE = 0.25  # of the results' spread: rounding makes 0.05, sums by other logarithms 1.3


@dataclass
class Library:
    """q [n, H, D], k and v [L, G, D] -> [n, H, D], causal from the end, from so many rows on."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    least_rows: int  # of a prompt's first chunk
    least_later_rows: int  # of a chunk with context before it
    trouble: str | None = None  # what it failed with; it is not asked again

    def takes(self, span: Span) -> bool:
        """Whether these rows are its own."""
        is_run = isinstance(span.context, slice)
        if self.trouble is not None or not (is_run or span.num_seen <= MAX_GATHERED_SLOTS):
            return False
        is_first = span.num_rows == span.num_seen
        return span.num_rows >= (self.least_rows if is_first else self.least_later_rows)

    def run(self, spans: Sequence[Span], q: Tensor, cache: LayerCache) -> list[Tensor]:
        """What the rows of each span see; of fewer spans where it fails, now or before."""
        results: list[Tensor] = []
        for span in spans:
            # 8-bit floats are always copied, for which memory is planned up to some length.
            is_copied = cache.sizes is not None
            if self.trouble is not None or (is_copied and span.num_seen > MAX_GATHERED_SLOTS):
                break
            try:
                # Slots side by side are read where they lie, others are copied together.
                k, v = cache.read(span.context)
                results.append(self.attend(q[span.start : span.stop], k, v))
            except torch.OutOfMemoryError:  # our kernel needs no room
                break
            except RuntimeError as error:  # a shape that it does not take after all
                self.trouble = first_line(error)
                _LOG.warning(
                    "%s is not used any more for long prompts: %s", self.name, self.trouble
                )
        return results


# On an H200 cuDNN is slower than our kernel at 2500 rows and far faster at 8192; it plans for every
# shape anew (50 to 200 ms), so it gets few of them.
LIBRARIES = {"cudnn": Library("cuDNN", by_cudnn, 4096, 2048)}
PREFERRED = ("cudnn",)


def choose_library(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device,
    *, names: Sequence[str] = PREFERRED,
) -> Library | None:  # fmt: skip
    """The first of `names` that computes what our kernel does; None: all prompts are ours."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    for name in names:
        library = replace(LIBRARIES[name])  # whatever happens to it is this engine's
        library.trouble = why_unusable(library, heads, kv_heads, dim, dtype, device)
        if library.trouble is None:
            return library
    return None


@torch.inference_mode()
def why_unusable(
    library: Library, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
    device: torch.device, *, rows: int = _TRIED[0], slots: int = _TRIED[1],
) -> str | None:  # fmt: skip
    """What it says, or by how much it differs from our kernel; None if it does not."""

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=draw, device=device).to(dtype)
        for shape in ((rows, heads, dim), (slots, kv_heads, dim), (slots, kv_heads, dim))
    )
    tiles = numbers(*(number for pair in tiles_of([rows]) for number in pair)).view(-1, 2)
    context = torch.arange(slots, dtype=torch.int32, device=device)
    wanted = prompt_attention(q, k, v, context, tiles, numbers(0, rows), numbers(0, slots))
    try:
        gap = float((library.attend(q, k, v) - wanted).abs().max() / wanted.std())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return first_line(error)
    return None if gap < _TOLERANCE else f"its results differ by {gap:.2g} of their spread"
