"""A quantised head as it is written, and what is said of it.

It is described as compressed-tensors, by the names under which engines ask for its modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headstart.checkpoint.quantized.nearest import as_compressed
from headstart.checkpoint.quantized.weights import QuantizedWeight
from headstart.checkpoint.quantized.writing import COMPRESSED_GROUPS, compressed_config
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import in_memory
from headstart.errors import some
from headstart.heads.export import plan_export
from headstart.heads.head import DRAFT_LM_HEAD, Head
from headstart.heads.ignore_lists import lookups
from headstart.heads.operation import Operation, megabytes
from headstart.models.build import LoadedModel
from headstart.quantize.inputs import Moments
from headstart.quantize.options import QuantizeOptions
from headstart.simulate.plan import Plan
from headstart.simulate.scoring import Scored


@dataclass(frozen=True)
class Rounded:
    """What becomes of a head."""

    weights: dict[str, QuantizedWeight]  # by our name of the weight
    lm_head: QuantizedWeight | None
    to_nearest: list[str]  # weights whose inputs were not seen
    group: int


def quantized_head(
    built: LoadedModel, head: Head, found: Rounded, scores: tuple[Scored, Scored],
    moments: Moments, options: QuantizeOptions,
) -> Operation:  # fmt: skip
    """The folder that is written, with what it costs and brings."""
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
