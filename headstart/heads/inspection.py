"""Everything that can be said about a checkpoint and its head from files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.checkpoint.quantized.names import is_quantized, is_scale
from headstart.checkpoint.reader import Checkpoint
from headstart.families.base import Family
from headstart.families.dims import dims, size
from headstart.heads.detection import FoundHead, State, declared_count, find_family, find_head_of
from headstart.heads.drafters import FoundDrafter, find_drafter
from headstart.heads.experts import has_fused_experts
from headstart.heads.file_pitfalls import outside_index, respelled_names
from headstart.heads.formats import format_of, open_head
from headstart.heads.pitfalls import pitfalls
from headstart.heads.sharing import Sharing, sharing

# Settings in generation_config.json that change what speculation brings or whether it is allowed.
_SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "max_new_tokens", "eos_token_id",
)  # fmt: skip
_KV_BYTES = 2  # engines keep K/V in 16 bits unless set otherwise


@dataclass(frozen=True)
class TrunkReport:
    # None: the config does not say, at least not under a name that we know
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    num_tensors: int
    num_bytes: int
    dtype: str
    quantization: str  # method named by the config, "" if none, or if it is for the head alone
    is_tied: bool


@dataclass(frozen=True)
class HeadReport:
    state: State
    declared: int | None
    modules: int
    tensors: int
    missing: tuple[str, ...]
    num_bytes: int
    dtype: str
    shares: dict[str, Sharing]
    kv_bytes_per_token: int
    experts: str  # "", "per expert" or "fused"
    root: str = ""  # prefix of the names of its tensors
    is_quantized: bool = False  # whether any of its weights is
    outside: tuple[str, ...] = ()  # files with tensors of it that the index does not list
    respelled: tuple[str, ...] = ()  # names that are not the family's usual ones

    @property
    def is_usable(self) -> bool:
        return self.state in ("complete", "undeclared")


@dataclass(frozen=True)
class Report:
    path: Path
    family: Family | None
    model_type: str
    architectures: tuple[str, ...]
    trunk: TrunkReport
    head: HeadReport
    generation: dict[str, Any]
    warnings: tuple[str, ...]
    config: dict[str, Any]
    drafter: FoundDrafter | None = None  # one that is no head
    format: str | None = None  # "gguf", "mlx", or None for published safetensors
    facts: Mapping[str, str] = field(default_factory=dict)  # what only this format has to say
    is_head_alone: bool = False  # a GGUF file that has no trunk

    def as_json(self) -> dict[str, Any]:
        """The machine-readable view; engines are added by the caller that knows them."""
        return {
            "path": str(self.path),
            "format": self.format,
            "family": self.family.name if self.family else None,
            "model_type": self.model_type,
            "architectures": list(self.architectures),
            "trunk": {
                "layers": self.trunk.num_layers,
                "hidden_size": self.trunk.hidden_size,
                "vocab_size": self.trunk.vocab_size,
                "tensors": self.trunk.num_tensors,
                "bytes": self.trunk.num_bytes,
                "dtype": self.trunk.dtype,
                "quantization": self.trunk.quantization or None,
                "tied": self.trunk.is_tied,
            },
            "head": {
                "state": self.head.state,
                "declared": self.head.declared,
                "modules": self.head.modules,
                "tensors": self.head.tensors,
                "missing": list(self.head.missing),
                "bytes": self.head.num_bytes,
                "dtype": self.head.dtype or None,
                "shares": self.head.shares,
                "kv_bytes_per_token": self.head.kv_bytes_per_token,
                "experts": self.head.experts or None,
                "quantized": self.head.is_quantized,
                "outside_index": list(self.head.outside),
            },
            "drafter": self.drafter.as_json() if self.drafter else None,
            "generation": self.generation,
            "warnings": list(self.warnings),
            **({"facts": dict(self.facts)} if self.facts else {}),
        }


@dataclass(frozen=True)
class StandaloneReport:
    """A head in a folder of its own, whole: anything less is an error when it is opened."""

    path: Path
    format: str
    family: Family
    model_type: str
    architectures: tuple[str, ...]
    modules: int
    tensors: int
    num_bytes: int
    dtype: str
    experts: str
    is_quantized: bool
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The keys of a model's report; what only a model has is null."""
        return {
            "path": str(self.path),
            "format": self.format,
            "family": self.family.name,
            "model_type": self.model_type,
            "architectures": list(self.architectures),
            "trunk": None,
            "head": {
                "state": "complete",
                "declared": None,
                "modules": self.modules,
                "tensors": self.tensors,
                "missing": [],
                "bytes": self.num_bytes,
                "dtype": self.dtype or None,
                "shares": {},
                "kv_bytes_per_token": None,
                "experts": self.experts or None,
                "quantized": self.is_quantized,
                "outside_index": [],
            },
            "drafter": None,
            "generation": {},
            "warnings": list(self.notes),
            "engines": {},
        }


def inspect_standalone(checkpoint: Checkpoint) -> StandaloneReport | None:
    """What a folder that holds only a head contains; None for a model."""
    name = format_of(checkpoint)
    if name is None or name == "gguf":  # whose report says more, with a trunk or without
        return None
    head = open_head(checkpoint.folder)
    return StandaloneReport(
        checkpoint.folder,
        name,
        head.family,
        checkpoint.config.model_type,
        checkpoint.config.architectures,
        head.num_modules,
        len(head.tensors),
        head.num_bytes,
        _head_dtype(head.tensors),
        _experts(head.tensors),
        head.is_quantized,
        head.config_notes(),
    )


def inspect(checkpoint: Checkpoint, model_type: str | None = None) -> Report:
    """Look at names, dtypes, copies and configuration; no tensor is loaded whole."""
    from headstart.heads.formats.gguf import GgufModel
    from headstart.heads.formats.gguf.report import inspect_gguf
    from headstart.heads.formats.mlx_model import is_mlx_model
    from headstart.heads.formats.mlx_report import inspect_mlx

    if isinstance(checkpoint, GgufModel):
        return inspect_gguf(checkpoint)
    if is_mlx_model(checkpoint):
        return inspect_mlx(checkpoint, model_type)
    owner = find_family(checkpoint, model_type)
    head = find_head_of(checkpoint, owner) if owner else None
    drafter = find_drafter(checkpoint)
    return Report(
        checkpoint.folder,
        owner,
        checkpoint.config.model_type,
        checkpoint.config.architectures,
        _trunk(checkpoint, head, drafter),
        _head(checkpoint, head),
        sampling_settings(checkpoint),
        tuple(pitfalls(checkpoint, head)),
        checkpoint.config.raw,
        drafter=drafter,
    )


def sampling_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """What generation_config.json says that matters to drafting."""
    return {k: v for k, v in checkpoint.generation_config.items() if k in _SAMPLING}


def _trunk(
    checkpoint: Checkpoint, head: FoundHead | None, drafter: FoundDrafter | None
) -> TrunkReport:
    fields = checkpoint.config.fields
    known = dims(fields)
    own = {*(head.tensors.values() if head else ()), *(drafter.tensors if drafter else ())}
    infos = [info for name, info in checkpoint.tensors.items() if name not in own]
    return TrunkReport(
        known.get("layers"),
        known.get("hidden"),
        known.get("vocab"),
        len(infos),
        sum(info.num_bytes for info in infos),
        main_dtype(infos),
        "" if _is_plain_beside(head, checkpoint, own) else _method(checkpoint),
        bool(checkpoint.config.raw.get("tie_word_embeddings")),
    )


def _method(checkpoint: Checkpoint) -> str:
    return str(checkpoint.config.quantization.get("quant_method") or "")


def _is_plain_beside(head: FoundHead | None, checkpoint: Checkpoint, own: set[str]) -> bool:
    """Whether the config speaks of the head alone: that is quantised, and nothing else is."""
    found = {name for name, info in checkpoint.tensors.items() if is_quantized(name, info)}
    return head is not None and bool(found) and found <= own


def _head(checkpoint: Checkpoint, head: FoundHead | None) -> HeadReport:
    if head is None:
        shares: dict[str, Sharing] = {}
        return HeadReport(
            "absent", declared_count(checkpoint.config), 0, 0, (), 0, "", shares, 0, ""
        )
    infos = {ours: checkpoint.info(name) for ours, name in head.tensors.items()}
    fields = head.family.fields_of_head(checkpoint.config.fields)
    elements = size(head.family.kv_elements, dims(fields)) or 0
    return HeadReport(
        head.state,
        head.declared,
        head.num_modules,
        len(infos),
        head.missing,
        sum(info.num_bytes for info in infos.values()),
        _head_dtype(infos),
        sharing(checkpoint, head) if infos else {},
        elements * _KV_BYTES * head.num_modules,
        _experts(infos),
        head.naming.root,
        any(is_quantized(name, info) for name, info in infos.items()),
        outside_index(checkpoint, head),
        respelled_names(head),
    )


def _experts(names: Mapping[str, object]) -> str:
    if has_fused_experts(names):
        return "fused"
    return "per expert" if any(".experts.0." in name for name in names) else ""


def _head_dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of the blocks' weights: copies of tables may have more bytes than all of them."""
    weights = {name: info for name, info in tensors.items() if not is_scale(name)}
    blocks = [info for name, info in weights.items() if ".block." in name]
    return main_dtype(blocks or list(weights.values()))


def main_dtype(infos: list[Any]) -> str:
    """The dtype that holds most bytes."""
    weight: Counter[str] = Counter()
    for info in infos:
        weight[info.dtype] += info.num_bytes
    return weight.most_common(1)[0][0] if weight else ""
