"""Known ways in which heads are lost, broken or misread, as far as files show them.

Each check yields sentences for people: what was seen, what it does, what to do. None of them is an
error; commands that cannot go on raise their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.quantized.names import is_quantized
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import some
from headstart.families.registry import GRAFTED_AS, WITHOUT_HEAD
from headstart.heads.detection import (
    FoundHead,
    expected_of,
    find_family,
    quoted,
    restore_command,
)
from headstart.heads.drafters import FoundDrafter, find_drafter
from headstart.heads.file_pitfalls import about_files, about_names
from headstart.heads.operation import counted
from headstart.heads.quantization_pitfalls import quantization_pitfalls
from headstart.heads.sharing import sharing


def pitfalls(checkpoint: Checkpoint, head: FoundHead | None) -> Iterator[str]:
    """Every warning that applies to this checkpoint."""
    drafter = find_drafter(checkpoint)
    if drafter is not None:
        yield from _drafter(drafter)
    elif head is None:
        yield _unknown_family(checkpoint)
    if head is None:
        return
    yield from _lost(checkpoint, head)
    yield from _config(checkpoint, head)
    if head.tensors:
        infos = {ours: checkpoint.info(name) for ours, name in head.tensors.items()}
        yield from about_names(checkpoint, head)
        yield from about_files(checkpoint, head)
        yield from _shapes(checkpoint, head, infos)
        yield from quantization_pitfalls(checkpoint, head, infos)
        yield from _copies(checkpoint, head)
        yield from _norm_style(checkpoint, head, infos)
        yield from _family(checkpoint, head, infos)
    yield from _generation(checkpoint)


def _drafter(found: FoundDrafter) -> Iterator[str]:
    name = found.kind.name
    holds = f"holds a {name} drafter" if found.is_inside else f"is a {name} drafter"
    yield (
        f"this checkpoint {holds} ({found.evidence}), which is no MTP head: served as MTP it "
        f"starts and accepts nothing. {found.serving()}. Its tensors are carried as they are; "
        "export, convert, stitch and graft refuse them."
    )


def _unknown_family(checkpoint: Checkpoint) -> str:
    name = checkpoint.config.model_type
    if name in GRAFTED_AS:
        return (
            f"{name} models publish no head. `headstart graft` adds a fresh one in the layout of "
            f"{GRAFTED_AS[name]}, which must be trained before it is of use."
        )
    if name in WITHOUT_HEAD:
        return f"{WITHOUT_HEAD[name]} Do not trust the config; there is nothing to serve with."
    suspects = [n for n in checkpoint.tensors if "mtp" in n or "eh_proj" in n or "nextn" in n]
    seen = f" Tensors that may be a head: {some(suspects)}." if suspects else ""
    return f"model_type {name!r} is not in the registry (see `headstart families`).{seen}"


def _lost(checkpoint: Checkpoint, head: FoundHead) -> Iterator[str]:
    remedy = restore_command(checkpoint)
    if head.state == "declared-but-missing" and not head.family.is_published:
        yield (
            f"the config declares {counted(head.declared or 0, 'module')}, no head tensor is "
            f"stored and no release of {head.family.title} has a head: do not trust the "
            f"config. If one was made for this model, get it back: {remedy}"
        )
    elif head.state == "declared-but-missing":
        yield (
            f"the config declares {counted(head.declared or 0, 'module')} but no head tensor is "
            "stored. Saving "
            "through transformers, LoRA merging and most quantisers drop heads. Engines refuse "
            f"to start or, in old releases, accept nothing. Get it back: {remedy}"
        )
    if head.state == "partial":
        yield (
            f"{counted(len(head.missing), 'head tensor')} missing: {some(head.missing)}. Engines "
            f"may load uninitialised memory in their place. Get them back: {remedy}"
        )
    if head.state == "absent" and find_drafter(checkpoint) is None:
        yield from _absent(checkpoint, head)


def _absent(checkpoint: Checkpoint, head: FoundHead) -> Iterator[str]:
    own = find_family(checkpoint)
    if own is not head.family:  # the family was given by hand: nothing says that one was lost
        yield (
            f"no head of {head.family.name} is stored, and the config's model_type is "
            f"{checkpoint.config.model_type!r}. "
            + ("Leave out --model-type." if own else _unknown_family(checkpoint))
        )
    elif head.family.is_published:
        remedy = restore_command(checkpoint)
        yield f"published {head.family.title} models have a head; this one lost it. {remedy}"


def _config(checkpoint: Checkpoint, head: FoundHead) -> Iterator[str]:
    field = head.family.count_field
    if head.state == "undeclared" and field is not None:
        yield (
            f"head tensors are stored but the config does not declare them ({field} is "
            f"{'0' if head.declared == 0 else 'absent'}); engines will not use the head. Set "
            f"{field} to {head.num_modules}."
        )
    if head.tensors and head.declared and head.declared != head.num_modules:
        yield (
            f"the config declares {counted(head.declared, 'module')}, the tensors hold "
            f"{head.num_modules}. "
            "Some exporters count repeated use of one module; set the count to what is stored."
        )
    if checkpoint.config.raw.get("quantization_config") == "":
        yield (
            'quantization_config is "" (as xLLM exports write it); readers that expect an object '
            "fail on it. Remove the field for engines other than xLLM."
        )


def _shapes(checkpoint: Checkpoint, head: FoundHead, infos: dict[str, TensorInfo]) -> Iterator[str]:
    expected = expected_of(head.family, checkpoint.config.fields, head.num_modules, infos)
    for name, shape in expected.items():
        info = infos.get(name)
        if info is None or shape is None or info.shape == shape:
            continue
        if is_quantized(name, info):  # packed weights have other shapes
            continue
        yield f"{info.name} has shape {info.shape}; the config asks for {shape}."
    if head.unexpected:
        yield (
            f"{len(head.unexpected)} tensors in the head are not known for {head.family.name}: "
            f"{some(head.unexpected)}. They are carried along as they are."
        )


def _copies(checkpoint: Checkpoint, head: FoundHead) -> Iterator[str]:
    for role, kind in sharing(checkpoint, head).items():
        if kind == "own" and role in head.family.copies:
            yield (
                f"the head's {role} differs from the trunk's; engines use the trunk's instead, "
                "so drafts come from another matrix than the head was trained with."
            )
        if kind == "from the trunk" and role not in head.family.layout.shares:
            yield f"the head should have its own {role} and has none."


def _norm_style(
    checkpoint: Checkpoint, head: FoundHead, infos: dict[str, TensorInfo]
) -> Iterator[str]:
    import numpy as np

    is_centred = head.family.has_centred_norms(checkpoint.config.fields)
    for role in ("embed_norm", "hidden_norm"):
        info = infos.get(f"modules.0.{role}.weight")
        if info is None or info.dtype not in ("BF16", "F32", "F16"):
            continue
        raw = np.fromfile(info.file, np.uint8, info.num_bytes, offset=info.start)
        if info.dtype == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(np.float32 if info.dtype == "F32" else np.float16)
        mean = float(values.astype(np.float64).mean()) if values.size else 0.0
        expected = "near 0 (effective weight 1 + w)" if is_centred else ("near 1")
        looks_zero_centred = mean < 0.25
        if not np.isfinite(values).all():
            yield f"{info.name} holds values that are not finite."
        elif mean > 0.9 and is_centred:
            yield f"{info.name} has mean {mean:.2f}; this family stores it {expected}. Was 1 added?"
        elif looks_zero_centred and not is_centred and mean < 0.02:
            yield f"{info.name} has mean {mean:.2f}; this family stores it {expected}."


def _family(checkpoint: Checkpoint, head: FoundHead, infos: dict[str, TensorInfo]) -> Iterator[str]:
    if head.num_modules > 1:
        vllm = head.family.layout.as_("vllm").topology
        if vllm != head.family.layout.topology:
            yield f"{head.num_modules} modules are stored; vLLM uses the first one for all depths."
    if head.family.disputed:
        how = "Compare acceptance in both before you rely on it."
        if head.family.is_probed_apart or head.family.layout.unsettled:
            how = f"`headstart inspect {quoted(checkpoint.folder)} --probe` runs it both ways."
        yield (
            f"{head.family.disputed}; which one the weights were trained with is not settled. {how}"
        )
    if any(name.endswith("qkv_proj.weight") for name in infos):
        ranks = checkpoint.config.get("num_key_value_heads")
        yield (
            "q, k and v are stored as one tensor whose rows may be pre-sharded, for as many ranks "
            f"as K/V heads ({ranks or 'not given'}); they are copied as they are. Splitting them "
            "as plain Q|K|V misplaces rows."
        )
    if any(name.endswith(".experts.gate_up_proj") for name in infos):
        yield (
            "experts are stored fused; loaders that know only the per-expert layout leave them "
            "uninitialised without an error. Use a recent engine."
        )
    if checkpoint.config.raw.get("tie_word_embeddings") and "lm_head" in head.family.layout.shares:
        yield (
            "embeddings are tied, so there is no lm_head tensor; standalone exports mark the tie "
            "or carry the embedding."
        )
    fields, trunk = checkpoint.config.fields, head.family.trunk
    kind = trunk.kind_of(fields, 0) if trunk.layer_kinds(fields) else ""
    if any(word in kind for word in ("linear_attention", "mamba", "recurrent")):
        yield (
            "the trunk is a hybrid with recurrent state: rejected drafts must roll it back, which "
            "costs part of the gain; in vLLM prefix caching needs --mamba-cache-mode align."
        )


def _generation(checkpoint: Checkpoint) -> Iterator[str]:
    settings = checkpoint.generation_config
    if settings.get("min_p"):
        yield (
            f"generation_config.json sets min_p {settings['min_p']}: vLLM refuses such requests "
            "while speculating, SGLang ignores the setting there."
        )
    penalty = settings.get("repetition_penalty")
    if isinstance(penalty, int | float) and penalty != 1:
        yield (
            f"generation_config.json sets repetition_penalty {penalty}: SGLang applies it only "
            "approximately while speculating, TensorRT-LLM refuses it unless enabled."
        )
