"""Per-row losses with their gradients, formed in the forward pass.

The LM head is frozen, so d loss / d states can be had from the logits while they exist: they are
formed for a chunk of rows, used and dropped. Nothing here is recorded by autograd, and nothing
waits for the device; `combine.py` hands the gradients to `backward()`.

R rows, D hidden size, V vocabulary, K depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

from headstart.backends.losses import LossKernels
from headstart.backends.numba.compiler import why_missing
from headstart.errors import ConfigError
from headstart.train.losses.fused import score_fused
from headstart.train.losses.kinds import LossKind, loss_kind
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.streamed import score_streamed
from headstart.train.losses.whole import Labels, Score, Scored, score_whole

DEFAULT_MAX_ELEMENTS = 2**26
_FEWEST_ELEMENTS = 2**20  # of logits, for kernels of a CPU
_FEWEST_ROWS = 32  # products of fewer rows read the whole LM head for next to nothing


@dataclass(frozen=True)
class RowLosses:
    """R rows of one depth."""

    loss: Tensor  # [R] fp32 (fp64 where the LM head is)
    gradient: Tensor  # [R, D] d loss[r] / d states[r], in the states' dtype
    overlap: Tensor  # [R] sum of min(p, q), p not renormalised on S; NaN without a teacher
    is_match: Tensor  # [R] bool: the draft's arg-max, as an original id, is the label
    is_kept: Tensor  # [R] bool: False where a draft vocabulary makes the loss drop the row

    @classmethod
    def empty(cls, states: Tensor, wide: torch.dtype) -> RowLosses:
        """Room for the rows of `states` [R, D]."""
        numbers = torch.empty(len(states), dtype=wide, device=states.device)
        flags = torch.empty_like(numbers, dtype=torch.bool)
        room = torch.empty_like(states, requires_grad=False)
        return cls(numbers, room, numbers.clone(), flags, flags.clone())

    def fill(self, rows: slice, scored: Scored, labels: Labels) -> None:
        self.loss[rows] = scored.terms.loss
        self.gradient[rows] = scored.gradient
        self.overlap[rows] = scored.sums.overlap
        self.is_match[rows] = scored.best == labels.ids
        self.is_kept[rows] = scored.terms.is_kept


@torch.no_grad()
def depth_losses(
    kind: str,
    depths: Sequence[Tensor],
    head: LmHead,
    *,
    labels: Tensor,
    teacher: Tensor | None = None,
    temperature: float = 1.0,
    lk_decay: float = 3.0,
    max_elements: int | None = DEFAULT_MAX_ELEMENTS,
    vocab_chunk: int | None = None,
) -> list[RowLosses]:
    """The losses of K depths whose rows predict the same tokens, the teacher's work done once.

    depths: K states [R, D], ready for the LM head; row r of each predicts labels[r] [R] (original
    ids). teacher [R, D]: the trunk's states after its final norm that choose those tokens. Both
    p and q are taken at `temperature`; nothing is multiplied by its square.

    A chunk of n rows has n * V <= max_elements (with kernels some times as many); None: all rows at
    once. Where the vocabulary is so
    large that hardly a row fits, it is cut as well: n * vocab_chunk <= max_elements, which is
    slower. `vocab_chunk` asks for that with so many tokens at a time.
    """
    loss = loss_kind(kind)
    score: Score = score_whole
    _check(kind, loss, temperature, vocab_chunk, has_teacher=teacher is not None)
    size = len(head.weight)
    if vocab_chunk is None:
        vocab_chunk = fitting_vocab_chunk(len(labels), size, max_elements)
    width = size if vocab_chunk is None else min(vocab_chunk, size)
    kernels = loss_kernels(head.weight, len(labels)) if vocab_chunk is None else None
    if kernels is not None:
        score = partial(score_fused, kernels)
        # Fewer and narrower tensors: that many more rows take about as much memory.
        max_elements = None if max_elements is None else max_elements * 8 // head.weight.itemsize
    results = [RowLosses.empty(states, head.wide) for states in depths]
    places, is_inside = head.place_labels(labels)

    def scaled(states: Tensor, rows: slice) -> Tensor:
        return (states[rows] / temperature).to(head.weight.dtype)

    for rows in row_chunks(len(labels), width, max_elements):
        chunk = Labels(labels[rows], places[rows], is_inside[rows])
        taught = None if teacher is None else scaled(teacher, rows)
        drafted = [scaled(states, rows) for states in depths]
        if vocab_chunk is None:
            parts = score(loss, head, drafted, chunk, taught, lk_decay)
        else:
            parts = score_streamed(
                loss, head, drafted, chunk, taught, lk_decay, vocab_chunk=vocab_chunk
            )
        for result, part in zip(results, parts, strict=True):
            result.fill(rows, part, chunk)
    if temperature != 1.0:
        for result in results:
            result.gradient.div_(temperature)
    return results


def loss_kernels(weight: Tensor, num_rows: int) -> LossKernels | None:
    """Those that form the losses of so many rows; their fp32 sums would not do for fp64.

    Imported where they are used: Triton need not be there without a GPU, nor numba without a CPU's
    kernels, and few rows are done before they are loaded.
    """
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return _load("headstart.backends.cuda.kernels.losses") if _is_there("triton") else None
    is_narrow = weight.dtype in (torch.bfloat16, torch.float32)
    is_many = num_rows * len(weight) >= _FEWEST_ELEMENTS
    if weight.device.type == "cpu" and is_narrow and is_many and why_missing() is None:
        return _load("headstart.backends.numba.losses")
    return None


@lru_cache(1)
def _is_there(library: str) -> bool:
    return find_spec(library) is not None


def _load(kernels: str) -> LossKernels:
    return cast(LossKernels, import_module(kernels))


def fitting_vocab_chunk(num_rows: int, vocab_size: int, max_elements: int | None) -> int | None:
    """Tokens at a time, where whole rows would be too few; None: the vocabulary need not be cut."""
    if max_elements is None or max_elements // vocab_size >= min(num_rows, _FEWEST_ROWS):
        return None
    return max(1, max_elements // min(num_rows, _FEWEST_ROWS))


def row_chunks(num_rows: int, width: int, max_elements: int | None) -> Iterator[slice]:
    """Slices of about equal size with rows * width <= max_elements, one row at least."""
    most = num_rows if max_elements is None else max(1, max_elements // width)
    num_chunks = -(-num_rows // most) if num_rows else 0
    for chunk in range(num_chunks):
        yield slice(chunk * num_rows // num_chunks, (chunk + 1) * num_rows // num_chunks)


def _check(
    name: str, kind: LossKind, temperature: float, vocab_chunk: int | None, *, has_teacher: bool
) -> None:
    if kind.needs_teacher and not has_teacher:
        raise ConfigError(
            f"loss {name} compares with the trunk's distribution, and no teacher states were "
            f"given; give them, or use the loss ce."
        )
    if not temperature > 0:
        raise ConfigError(f"teacher temperature is {temperature}; give a value above 0")
    if vocab_chunk is not None and vocab_chunk < 1:
        raise ConfigError(f"vocab_chunk is {vocab_chunk}; give at least 1 token, or None")
