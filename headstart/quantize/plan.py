"""A head in fewer bits: rounded for what its matrices get, scored before and after.

The projections of its block are rounded, as in releases of quantised models: engines build fusion,
norms and routers plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from headstart.checkpoint.quantized.writing import (
    GROUPS,
)
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record
from headstart.errors import CheckpointError, HeadNotFound, QuantizeError, UnsupportedFamily, some
from headstart.heads.experts import split_experts
from headstart.heads.formats import open_head
from headstart.heads.head import Head, head_of
from headstart.heads.operation import Operation
from headstart.heads.quantized_copy import PROJECTIONS
from headstart.models.build import LoadedModel
from headstart.models.linear import Linear
from headstart.models.loading import head_targets
from headstart.models.mtp import MTPHead, MTPModule
from headstart.quantize.inputs import LM_HEAD, Moments, draft_inputs
from headstart.quantize.options import QuantizeOptions
from headstart.quantize.result import Rounded, quantized_head
from headstart.quantize.rounding import rounded
from headstart.simulate.plan import make_plan
from headstart.simulate.scoring import WHOLE, Read, Scored, batches, score

Progress = Callable[[int], None]


def open_source(checkpoint: Checkpoint, folder: Path | None) -> Head:
    """The head to quantise, with one tensor for each expert; refused if it is quantised."""
    head = open_head(folder) if folder is not None else head_of(checkpoint)
    if head.is_quantized or head.draft_lm_head:
        raise CheckpointError(
            f"{head.origin.folder} holds a head that is quantised already; rounding it again would "
            "cost more. Give the head that it was made from."
        )
    return replace(head, tensors=split_experts(head.tensors))


def plan_quantize(
    built: LoadedModel, head: Head, answers: tuple[Sequence[Record], Sequence[Record]],
    options: QuantizeOptions, progress: Progress = lambda num_tokens: None,
) -> Operation:  # fmt: skip
    """The head in fewer bits; `answers`: those it is rounded for, and those it is scored on.

    The model's head is replaced in memory. QuantizeError where it loses more than is allowed.
    """
    if built.head is None:
        raise HeadNotFound(f"{built.checkpoint.folder} has no head. Give one with --head.")
    own, held_out = answers
    how = make_plan(held_out, None, "match")
    ends = PromptReader(built.checkpoint).end_ids
    read = list(batches(built, held_out, how, options.max_drafts, ends))

    def states() -> Iterator[Read]:
        for each in batches(built, own, how, options.max_drafts, ends):
            yield each
            progress(len(each[1].ids))

    def scored() -> Scored:
        found = score(
            built, held_out, how, max_drafts=options.max_drafts, read=read, progress=progress
        )
        return found[WHOLE].overall

    before = scored()
    moments = draft_inputs(built.head, built.trunk, states(), options.max_drafts)
    found = _rounded(built, head, moments, options)
    _put(built.head, found, head, built.dtype)
    after = scored()
    k = options.max_drafts
    loss = 1 - after.lengths[k] / before.lengths[k]
    if loss > options.max_loss:
        raise QuantizeError(
            f"--bits {options.bits}: the acceptance length at K = {k} falls from "
            f"{before.lengths[k]:.3f} to {after.lengths[k]:.3f}, by {100 * loss:.1f} %; --max-loss "
            f"allows {100 * options.max_loss:g} %. Use more bits, --no-lm-head, or a larger "
            "--max-loss."
        )
    return quantized_head(built, head, found, (before, after), moments, options)


def _rounded(built: LoadedModel, head: Head, moments: Moments, options: QuantizeOptions) -> Rounded:
    assert built.head is not None
    targets = dict(head_targets(dict(built.head.state_dict()), built.head.config, head.tensors))
    names = [name for name in targets if _is_projection(name, head.tensors[name])]
    if not names:
        raise UnsupportedFamily(
            f"no matrix of this {head.family.name} head is one that quantised releases store; "
            "expected projections of attention and MLP."
        )
    group = _group(head, names) if options.bits == "4" else 0
    made, to_nearest = {}, []
    for name in names:
        inputs = moments.of(targets[name].parameter)
        if inputs is None:
            to_nearest.append(name)
        values = load(head.tensors[name]).to(built.device)
        made[name] = rounded(values, options.bits, group, inputs)
    lm_head, trunk_head = None, built.trunk.lm_head
    if options.lm_head and not built.head.own_lm_heads:
        width = trunk_head.matrix.shape[1]
        if options.bits != "4" or width % group == 0:
            lm_head = rounded(trunk_head.matrix.data, options.bits, group, moments.sums[LM_HEAD])
    return Rounded(made, lm_head, to_nearest, group)


def _is_projection(name: str, source: TensorSource) -> bool:
    module, _, parameter = name.rpartition(".")
    is_matrix = parameter == "weight" and len(source.shape) == 2
    return is_matrix and ".block." in name and module.rpartition(".")[2] in PROJECTIONS


def _group(head: Head, names: Sequence[str]) -> int:
    """The largest size of groups that every row is a whole number of."""
    widths = {name: head.tensors[name].shape[1] for name in names}
    fitting = [g for g in GROUPS if all(width % g == 0 for width in widths.values())]
    if not fitting:
        odd = [name for name, width in widths.items() if width % GROUPS[-1]]
        raise UnsupportedFamily(
            f"{some(odd)} has rows that are no whole number of groups of "
            f"{', '.join(map(str, GROUPS))}. Use --bits 8 or fp8."
        )
    return fitting[0]


def _put(module: MTPHead, found: Rounded, head: Head, dtype: torch.dtype) -> None:
    """Let the modules compute with what will be written."""
    parameters = dict(module.state_dict(keep_vars=True))
    for name, target in head_targets(parameters, module.config, head.tensors):
        if name not in found.weights:
            continue
        values = found.weights[name].dequantized(dtype)
        part = target.of(parameters[target.parameter].data)
        part.copy_(values[torch.tensor(target.order)] if target.order else values)
    if found.lm_head is None:
        return
    drafting = Linear(0, 0)
    drafting.weight = nn.Parameter(found.lm_head.dequantized(dtype), requires_grad=False)
    for each in module.modules_:
        if isinstance(each, MTPModule) and each.lm_head is None:
            each.lm_head = drafting
