"""Recurrent layers with `exact`: rounds, prompts and whatever is ragged, each row after the other.

What `recurrent.py` and `recurrent_prompts.py` do in the fastest way is done here in one way for all
numbers of rows (`kernels/delta_exact.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.backends.cuda.exact import ExactKernels, filled
from headstart.backends.cuda.forward import Recur
from headstart.backends.cuda.kernels.delta import DeltaRequests, Rings, empty_rings
from headstart.backends.cuda.kernels.delta_exact import (
    ExactRows,
    ExactRuns,
    convolve_rows,
    delta_runs,
)
from headstart.backends.cuda.recurrent import RecurrentBatch
from headstart.backends.rows import on_device
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, StateSpan


def exact_round_recur(
    kernels: ExactKernels, batch: RecurrentBatch, states: list[LayerStates], first: Tensor,
    rows: int,
) -> Recur:  # fmt: skip
    """How `rows` new rows of each request go on; of requests with `first` below 0 none do."""
    own = batch.at(first)
    at = first[:, None] + torch.arange(rows, dtype=first.dtype, device=first.device)
    at = at.masked_fill(first[:, None] < 0, -1).flatten()
    placed = ExactRows(at, own.buffers.repeat_interleave(rows))
    runs = _repeated(own, rows)

    def recur(net: DeltaNet, layer: int, x: Tensor) -> Tensor:
        partial, rings = kernels.product(x, net.inputs), batch.rings[layer]
        convolve_rows(partial, net.conv.squeeze(1), net.a_log, net.dt_bias, placed, rings)
        return _read(kernels, net, partial, states[layer], [runs], rings, len(at))

    return recur


def exact_repeat(net: DeltaNet, state: LayerStates, own: DeltaRequests, rings: Rings) -> None:
    """Memories that are behind by the rows of a round are brought up to date."""
    nothing = state.memory.new_zeros(1, 1, 1)
    result = rings.mixed.new_empty(0)
    _run(net, nothing, state, _repeated(own, 0), rings, result)


def _repeated(own: DeltaRequests, rows: int) -> ExactRuns:
    """What was accepted of the last round, and `rows` new ones."""
    is_there = own.first >= 0
    counts = torch.where(is_there, own.replays + rows, 0).to(torch.int32)
    lines = torch.arange(len(counts), dtype=torch.int32, device=counts.device) * rows
    return ExactRuns(
        own.first - own.replays, counts, own.replays, lines, own.buffers, own.slots, own.replays,
        own.slots,
    )  # fmt: skip


def exact_prompt_recur(
    kernels: ExactKernels, states: list[LayerStates], spans: Sequence[StateSpan]
) -> Recur:
    """How rows go on that are `spans`, one after another without gaps."""
    device, kept = states[0].memory.device, states[0].conv.shape[1]
    # All texts lie in one ring, each behind the rows that its convolution looks back at: what was
    # kept of a text that goes on, or zeros.
    begins = [span.start + (number + 1) * kept for number, span in enumerate(spans)]
    lengths = [span.stop - span.start for span in spans]
    positions = [
        at for begin, count in zip(begins, lengths, strict=True)
        for at in range(begin, begin + count)
    ]  # fmt: skip
    at = on_device(positions, device, torch.int32)
    placed = ExactRows(at, torch.zeros_like(at))
    places, steps = len(positions) + len(spans) * kept, _steps(spans, begins, device)

    def recur(net: DeltaNet, layer: int, x: Tensor) -> Tensor:
        config, state = net.config, states[layer]
        partial = kernels.product(x, net.inputs)
        rings = empty_rings(1, places, config.channels, config.v_heads, x.dtype, x.device)
        inputs = rings.inputs[0]
        for span, begin in zip(spans, begins, strict=True):
            if span.source is not None:
                inputs[begin - kept : begin] = state.conv[span.source]
        convolve_rows(partial, net.conv.squeeze(1), net.a_log, net.dt_bias, placed, rings)
        result = _read(kernels, net, partial, state, steps, rings, len(positions))
        for span, begin in zip(spans, begins, strict=True):
            for done, slot in span.keeps:
                state.conv[slot] = inputs[begin + done - kept : begin + done]
            for _, (one, *others) in span.pieces():
                for slot in others:
                    state.memory[slot] = state.memory[one]
        return result

    return recur


def _steps(
    spans: Sequence[StateSpan], begins: Sequence[int], device: torch.device
) -> list[ExactRuns]:
    """All requests from one state that is kept to the next, until the last of them is done."""
    pieces = [span.pieces() for span in spans]
    steps = list[ExactRuns]()
    for step in range(max(map(len, pieces))):
        lines = list[list[int]]()
        for number, (span, begin) in enumerate(zip(spans, begins, strict=True)):
            if step >= len(pieces[number]):
                continue
            rows, slots = pieces[number][step]
            source = pieces[number][step - 1][1][0] if step else span.source
            count = rows.stop - rows.start
            first = begin + rows.start - span.start
            before = -1 if source is None else source
            lines.append([first, count, 0, rows.start, 0, before, count, slots[0]])
        columns = zip(*lines, strict=True)
        steps.append(ExactRuns(*(on_device(own, device, torch.int32) for own in columns)))
    return steps


def _read(
    kernels: ExactKernels, net: DeltaNet, partial: Tensor, state: LayerStates,
    steps: Sequence[ExactRuns], rings: Rings, rows: int,
) -> Tensor:  # fmt: skip
    """Partial sums of what `rows` rows say, filled up to whole tiles."""
    heads, v_dim = state.memory.shape[1], state.memory.shape[3]
    said = torch.zeros(rows, heads * v_dim, dtype=rings.mixed.dtype, device=partial.device)
    for runs in steps:
        _run(net, partial, state, runs, rings, said)
    return kernels.product(filled(said), net.out)


def _run(
    net: DeltaNet, partial: Tensor, state: LayerStates, runs: ExactRuns, rings: Rings,
    result: Tensor,
) -> None:  # fmt: skip
    is_silu = net.config.gate == "silu"
    delta_runs(partial, net.norm, net.eps, state.memory, runs, rings, result, is_silu=is_silu)
