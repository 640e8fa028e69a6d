"""A head in fewer bits: rounded for what its matrices get, scored before and after, planned.

The projections of its block are rounded, as in releases of quantised models: engines build fusion,
norms and routers plain. What is written is described as compressed-tensors, by the names under
which engines ask for the head's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from headstart.checkpoint.quantized.nearest import as_compressed
from headstart.checkpoint.quantized.weights import QuantizedWeight
from headstart.checkpoint.quantized.writing import (
    COMPRESSED_GROUPS,
    GROUPS,
    compressed_config,
)
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import in_memory, load
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record
from headstart.errors import CheckpointError, HeadNotFound, QuantizeError, UnsupportedFamily, some
from headstart.heads.experts import split_experts
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head
from headstart.heads.head import DRAFT_LM_HEAD, Head, head_of
from headstart.heads.ignore_lists import lookups
from headstart.heads.operation import Operation, megabytes
from headstart.heads.quantized_copy import PROJECTIONS
from headstart.models.build import LoadedModel, build
from headstart.models.linear import Linear
from headstart.models.loading import head_targets
from headstart.models.mtp import MTPHead, MTPModule
from headstart.quantize.inputs import LM_HEAD, Moments, draft_inputs
from headstart.quantize.options import QuantizeOptions
from headstart.quantize.rounding import rounded
from headstart.simulate.plan import Plan, make_plan
from headstart.simulate.scoring import WHOLE, Scored, batches, score

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Rounded:
    """What becomes of a head."""

    weights: dict[str, QuantizedWeight]  # by our name of the weight
    lm_head: QuantizedWeight | None
    to_nearest: list[str]  # weights whose inputs were not seen
    group: int


def open_source(checkpoint: Checkpoint, folder: Path | None) -> Head:
    """The head to quantise, with one tensor for each expert; refused if it is quantised."""
    head = open_head(folder) if folder is not None else head_of(checkpoint)
    if head.is_quantized or head.draft_lm_head:
        raise CheckpointError(
            f"{head.origin.folder} holds a head that is quantised already; rounding it again would "
            "cost more. Give the head that it was made from, or add nothing to it."
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

    def scored() -> Scored:
        found = score(
            built, held_out, how, max_drafts=options.max_drafts, read=read, progress=progress
        )
        return found[WHOLE].overall

    before = scored()
    moments = draft_inputs(built, own, options.max_drafts, progress)
    found = _rounded(built, head, moments, options)
    _put(built.head, found, head, built.dtype)
    after = scored()
    k = options.max_drafts
    loss = 1 - after.lengths[k] / before.lengths[k]
    if loss > options.max_loss:
        raise QuantizeError(
            f"with {options.bits} bits the acceptance length at K = {k} falls from "
            f"{before.lengths[k]:.3f} to {after.lengths[k]:.3f}, by {100 * loss:.1f} %; --max-loss "
            f"allows {100 * options.max_loss:g} %. Use more bits, --no-lm-head, or a larger "
            "--max-loss."
        )
    return _operation(built, head, found, (before, after), moments, options)


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


def _operation(
    built: LoadedModel, head: Head, found: Rounded, scores: tuple[Scored, Scored],
    moments: Moments, options: QuantizeOptions,
) -> Operation:  # fmt: skip
    before, after = scores
    k = options.max_drafts
    small = _small_head(head, found, options)
    operation = plan_export(small, "headstart", name="quantize")
    tables = {
        name: sum(source.num_bytes for source in sources)
        for name, sources in (
            ("head", head.tensors.values()), ("quantized_head", small.tensors.values()),
            ("quantized_lm_head", small.draft_lm_head.values()),
        )
    }  # fmt: skip
    trunk_head = built.trunk.lm_head.matrix
    tables["lm_head"] = trunk_head.numel() * 2  # as BF16, whatever it is held in
    facts = {
        **operation.facts,
        "bytes": f"head {megabytes(tables['head'])} -> {megabytes(tables['quantized_head'])}"
        + (
            f", LM head for drafts {megabytes(tables['lm_head'])} (BF16) -> "
            f"{megabytes(tables['quantized_lm_head'])}" if found.lm_head is not None else ""
        ),
        "rounded for": f"{moments.num_rows} rows at depths 1 to {k}",
        "acceptance": f"length {before.lengths[k]:.3f} -> {after.lengths[k]:.3f} at K = {k} "
        f"({_percent(before.lengths[k], after.lengths[k])}), {_method(before.plan)}",
    }  # fmt: skip
    measured = {
        "bits": options.bits, "group_size": found.group or None, "size_bytes": tables,
        "rows": moments.num_rows, "method": before.plan.method,
        "acceptance": {"before": before.as_json(), "after": after.as_json()},
        "loss": 1 - after.lengths[k] / before.lengths[k], "drafts": k,
    }  # fmt: skip
    kept = {key: value for key, value in measured.items() if key != "acceptance"}
    lengths = {"before": before.lengths, "after": after.lengths}
    details = {**operation.details, "quantize": {**kept, "acceptance_length": lengths}}
    return replace(operation, facts=facts, measured=measured, details=details)


def _small_head(head: Head, found: Rounded, options: QuantizeOptions) -> Head:
    tensors: dict[str, TensorSource] = {}
    for name, source in head.tensors.items():
        if name not in found.weights:
            tensors[name] = source
            continue
        module = name.removesuffix(".weight")
        tensors |= _sources(module, found.weights[name])
    drafting = {} if found.lm_head is None else _sources(DRAFT_LM_HEAD, found.lm_head)
    modules = [name.removesuffix(".weight") for name in found.weights]
    targets = [
        *lookups(head.family, head.naming(), modules),
        *([DRAFT_LM_HEAD] if drafting else []),
    ]
    group = {"targets": targets, **COMPRESSED_GROUPS[options.bits](found.group)}
    notes = [f"{len(modules)} matrices were quantised: {_words(options, found)}"]
    if found.to_nearest:
        notes.append(
            f"{len(found.to_nearest)} of them were rounded to nearest, their inputs are not seen: "
            f"{some(found.to_nearest)}"
        )
    if options.lm_head and not drafting:
        notes.append("its LM heads stay as they are: they are its own, or their rows do not fit")
    return replace(
        head.changed(tensors, *notes),
        quantization=compressed_config({"group_0": group}, str(group["format"])),
        draft_lm_head=drafting,
    )


def _sources(module: str, weight: QuantizedWeight) -> dict[str, TensorSource]:
    made = as_compressed(weight)
    return {f"{module}.{suffix}": in_memory(tensor.cpu()) for suffix, tensor in made.items()}


def _words(options: QuantizeOptions, found: Rounded) -> str:
    words: dict[str, str] = {
        "4": f"4 bits in groups of {found.group}", "8": "8-bit integers, one scale per row",
        "fp8": "8-bit floats, one scale per row",
    }  # fmt: skip
    return words[options.bits]


def _method(plan: Plan) -> str:
    return "walked" if plan.method == "replay" else "by formula"


def _percent(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %"


def load_model(
    checkpoint: Checkpoint, head: Path | None, *, device: str, dtype: str
) -> LoadedModel:
    """The model as `score` runs it."""
    return build(checkpoint, head, device=device, dtype=dtype)
