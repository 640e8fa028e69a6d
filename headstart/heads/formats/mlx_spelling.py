"""A head as MLX has it, made of ours and turned back.

Experts are stacked as `switch_mlp`. Norms of Qwen are stored as 1 + w, which is rounded to the
dtype of the weights: small ones do not come back with every bit. Quantised weights keep their bytes
from one place of MLX to another, and are dequantised for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headstart.checkpoint.affine import BITS, Affine, dequantized, quantized, setting_of
from headstart.checkpoint.gguf.encoding import PLAIN
from headstart.checkpoint.gguf.values import cast, shifted
from headstart.checkpoint.source import TensorSource
from headstart.errors import (
    ConfigError,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedFamily,
)
from headstart.families.base import Family
from headstart.heads.experts import stack_experts, unstack_experts
from headstart.heads.formats.mlx_drafters import DRAFTERS, KEYS, VALUES, Drafter
from headstart.heads.head import Head, config_fields, dequantize
from headstart.heads.latent import joined_kv_b, split_kv_b
from headstart.heads.operation import counted

GROUP_SIZE = 64  # where neither an option nor the model says
_EXACT = ("mlp.gate.weight",)  # routers, which mlx-vlm does not quantise
_QUANTIZED = (".scales", ".biases")


@dataclass(frozen=True)
class SpelledMlx:
    """Tensors under MLX's names below the prefix of a head, and how they are quantised."""

    tensors: Mapping[str, TensorSource]
    quantization: Mapping[str, Any] = field(default_factory=dict)  # as configs have it
    is_raw: bool = False  # norms lack the one that MLX adds
    changes: tuple[str, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return any(name.endswith(_QUANTIZED) for name in self.tensors)


def affine_of(head_type: str | None, group_size: int = GROUP_SIZE) -> Affine | None:
    """What `--head-type` asks of MLX: q4, q8 and so on; None for weights as they are."""
    if head_type in (None, "bf16"):
        return None
    known = {f"q{bits}": bits for bits in BITS}
    if head_type not in known:
        raise ConfigError(
            f"--head-type is {str(head_type)[:40]!r}; expected bf16 or one of "
            f"{', '.join(known)} for MLX."
        )
    return Affine(known[str(head_type)], group_size)


def without_copies(head: Head) -> Head:
    """The head without copies of the trunk's tables that a drafter has no place for."""
    drafter = DRAFTERS[head.family.name]
    dropped = [
        name
        for name in head.tensors
        if name.split(".")[2] in head.family.copies and drafter.theirs(name) is None
    ]
    if not dropped:
        return head
    kept = {name: source for name, source in head.tensors.items() if name not in dropped}
    said = "the head's copies of embedding and LM head were left out; mlx-vlm uses the target's"
    return replace(head.changed(kept, said), left_out=(*head.left_out, *dropped))


def spell_mlx(head: Head, how: Affine | None = None) -> SpelledMlx:
    """The head as mlx-vlm's `split_mtp` writes it."""
    drafter = DRAFTERS[head.family.name]
    head = dequantize(head)
    tensors = {**head.tensors, **(_tables(head) if drafter.has_tables else {})}
    result: dict[str, TensorSource] = {}
    for name, source in stack_experts(tensors).items():
        theirs = drafter.theirs(name)
        if theirs is None:
            raise UnexpectedTensor(
                f"the head holds {name}, for which MLX's drafter has no place. Remove it, or use "
                "--format headstart."
            )
        if name == drafter.kv_b:
            fields = head.family.fields_of_head(config_fields(head.config))
            stem = theirs.removesuffix("kv_b_proj.weight")
            result[stem + KEYS], result[stem + VALUES] = split_kv_b(name, source, fields)
        elif drafter.shifts_norms and name.endswith("norm.weight"):
            result[theirs] = shifted(source, 1.0, source.dtype)
        else:
            result[theirs] = cast(source, "F32") if name.endswith(drafter.in_fp32) else source
    return requantized(SpelledMlx(result, changes=head.changes), how)


def requantized(spelled: SpelledMlx, how: Affine | None) -> SpelledMlx:
    """The same head with its plain weights quantised; what is quantised already stays so."""
    if how is None:
        return spelled
    if spelled.is_quantized:
        raise ConfigError(
            "--head-type: the head is quantised already, and rounding it again would cost more. "
            "Take it as it is, or the head of the original model."
        )
    tensors: dict[str, TensorSource] = {}
    count = 0
    for name, source in spelled.tensors.items():
        is_weight = name.endswith(".weight") and not name.endswith(_EXACT)
        if is_weight and how.fits(source.shape) and source.dtype in PLAIN:
            stem = name.removesuffix("weight")
            tensors |= {stem + part: each for part, each in quantized(source, how).items()}
            count += 1
        else:
            tensors[name] = source
    said = f"{counted(count, 'tensor')} quantised to {how.bits} bits in groups of "
    said += f"{how.group_size}, which cannot be undone"
    settings = {"group_size": how.group_size, "bits": how.bits, "mode": "affine"}
    return SpelledMlx(tensors, settings, spelled.is_raw, (*spelled.changes, said))


def _tables(head: Head) -> dict[str, TensorSource]:
    """Embedding and LM head: the head's own, else those of the trunk."""
    trunk = {"embed_tokens": head.family.trunk.embed, "lm_head": head.family.trunk.lm_heads[0]}
    found: dict[str, TensorSource] = {}
    for role, ending in trunk.items():
        own = f"modules.0.{role}.weight"
        lent = [s for name, s in head.trunk_tensors.items() if name.endswith(ending)]
        if own not in head.tensors and not lent and role == "embed_tokens":
            raise MissingTensor(
                f"MLX's drafter of {head.family.title} holds the embedding, which is not at hand. "
                "Export from the whole model, or add --model MODEL."
            )
        if own not in head.tensors and lent:
            found[own] = lent[0]
    return found


def unspell_mlx(
    spelled: SpelledMlx, owner: Family, place: Path
) -> tuple[dict[str, TensorSource], tuple[str, ...]]:
    """Tensors under our names, and what is not as it was published, in words."""
    drafter = DRAFTERS[owner.name]
    tensors: dict[str, TensorSource] = {}
    for name, source in _plain(spelled, place).items():
        ours = drafter.ours(name)
        if ours is None:
            raise UnexpectedTensor(
                f"{place} holds {name}, which is not part of a {owner.name} head. Remove it, or "
                "convert the head again."
            )
        is_shifted = drafter.shifts_norms and not spelled.is_raw and source.dtype in PLAIN
        if is_shifted and ours.endswith("norm.weight"):
            source = shifted(source, -1.0, source.dtype)
        tensors[ours] = source
    if drafter.kv_b:
        stem = drafter.kv_b.removesuffix("kv_b_proj.weight")
        parts = [tensors.pop(stem + each, None) for each in (KEYS, VALUES)]
        if parts[0] is None or parts[1] is None:
            raise MissingTensor(f"{place} lacks {KEYS} or {VALUES}. Make it again.")
        tensors[drafter.kv_b] = joined_kv_b(parts[0], parts[1])
    return unstack_experts(tensors), tuple(_said(spelled, drafter))


def _plain(spelled: SpelledMlx, place: Path) -> dict[str, TensorSource]:
    """All tensors, those that are quantised dequantised."""
    result: dict[str, TensorSource] = {}
    for name, source in spelled.tensors.items():
        stem, _, parameter = name.rpartition(".")
        parts = [spelled.tensors.get(f"{stem}.{each}") for each in ("weight", "scales", "biases")]
        if parameter in ("scales", "biases"):
            if parts[0] is None:
                raise MissingTensor(
                    f"{place} holds {name} without {stem}.weight. The file is damaged: download or "
                    "convert it again."
                )
        elif parameter != "weight" or parts[1] is None:
            result[name] = source
        elif parts[2] is None:
            raise UnsupportedFamily(
                f"{place} holds {stem}.scales without biases: quantised in another way than "
                "MLX's affine one (mxfp4, nvfp4, ...), which is not read here. Take a head in "
                "BF16, or that of the original model."
            )
        else:
            how = setting_of(spelled.quantization, stem, place)
            result[name] = dequantized(name, source, parts[1], parts[2], how)
    return result


def _said(spelled: SpelledMlx, drafter: Drafter) -> list[str]:
    said = []
    if spelled.is_quantized:
        count = sum(name.endswith(".scales") for name in spelled.tensors)
        said.append(f"{counted(count, 'tensor')} of MLX dequantised, not the published values")
    if drafter.shifts_norms:
        how = "as published" if spelled.is_raw else (
            "as 1 + w in the weights' dtype, so small ones are rounded"
        )  # fmt: skip
        said.append(f"MLX stored its norms {how}")
    return said
