"""Which library computes the attention of long prompts; short ones and all else stay with ours.

A library is taken when it gives what our own kernel gives, tried once at the start. `PREFERRED` is
the one place that says which are tried, and in which order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.backends.cuda.cudnn import by_cudnn
from headstart.backends.cuda.kernels.prompts import prompt_attention, tiles_of
from headstart.errors import first_line
from headstart.models.attention import MAX_GATHERED_SLOTS, LayerCache, Span

_LOG = logging.getLogger(__name__)
_TRIED = (1800, 3400)  # rows and slots: filled up before and behind, and two pieces of context
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
            if self.trouble is not None:
                break
            try:
                # Slots side by side are read where they lie, others are copied together.
                k, v = cache.k[span.context], cache.v[span.context]
                results.append(self.attend(q[span.start : span.stop], k, v))
            except torch.OutOfMemoryError:  # our kernel needs no room
                break
            except RuntimeError as error:  # a shape that it does not take after all
                self.trouble = first_line(error)
                _LOG.warning(
                    "%s is not used any more for long prompts: %s", self.name, self.trouble
                )
        return results


# On an H200 cuDNN is behind our kernel at 2500 rows and far ahead at 8192; it plans for every shape
# anew (50 to 200 ms), so it gets few of them.
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
