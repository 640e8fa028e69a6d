"""From a checkpoint folder to modules on a device: the trunk, and its head if there is one.

Engine, training and scoring all load a model here, so that they run the same thing. Weights are in
the dtype that was asked for; a backend may hold them in another format afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstart.checkpoint.quantized.weights import FORMS
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import ConfigError, HeadNotFound, UnsupportedFamily
from headstart.families.base import Family
from headstart.families.registry import GRAFTED_AS
from headstart.heads.detection import find_family, find_head_of
from headstart.heads.formats import open_head
from headstart.heads.head import Head, head_of
from headstart.heads.published import PublishedModel
from headstart.heads.sharing import trunk_prefix
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config
from headstart.models.loading import Loading, TrunkNames, check_size, fill_trunk
from headstart.models.mtp import MTPHead
from headstart.models.rope import table_bytes
from headstart.models.same_form import check_same_geometry
from headstart.models.stored import (
    HeadLoading,
    Layout,
    head_modules,
    load_stored_head,
    trunk_tensors,
)
from headstart.models.trunk import Trunk

_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "float16": torch.float16,
}  # fmt: skip

_TABLE_BYTES = 1 << 30  # of rotary tables, where no length was asked for: about a million positions


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with its head if there is one."""

    checkpoint: Checkpoint
    config: ModelConfig
    trunk: Trunk
    head: MTPHead | None
    dtype: torch.dtype
    device: torch.device
    max_len: int
    notes: tuple[str, ...]  # what was decided on the way, for people
    head_loading: HeadLoading | None = None  # how its head was loaded, for another one


@dataclass(frozen=True)
class Held:
    """Quantised forms that stay as they are stored; others are dequantised at load."""

    trunk: Collection[str] = ()
    head: Collection[str] = ()
    why_not: str = ""  # why not others
    experts: Collection[str] | None = None  # those of experts, where they are not all


@dataclass(frozen=True)
class _Stored:
    """What a checkpoint holds: its family, and the head that will be run."""

    family: Family | None
    head: Head | None
    head_names: frozenset[str]  # published names of the head inside the checkpoint, run or not


def build(
    checkpoint: Checkpoint,
    head_folder: Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int | None = None,
    layout: Layout = "own",
    with_head: bool = True,
    holds: Callable[[LoadedModel], Held] | None = None,
    draft_lm_head: bool = True,
    with_layers: bool = True,
) -> LoadedModel:
    """Load trunk and head onto a device.

    `holds` is asked, with modules that have no memory yet, which weights stay as they are stored;
    the plain modules take them all. `draft_lm_head`: whether drafts go through the LM head that a
    head may bring for them. Without `with_layers` the trunk has embedding, last norm and LM head
    alone: enough where its states come from elsewhere.
    """
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    config = model_config(checkpoint.config.fields)
    notes = list(checkpoint.remarks())
    max_len = max_model_len or _own_length(config, kind, notes)
    if max_len > config.max_positions:
        raise ConfigError(
            f"max_model_len is {max_len}; the model was made for {config.max_positions} positions "
            "(max_position_embeddings). Give at most that.",
            field="max_model_len",
        )
    stored = _find(checkpoint, head_folder, notes, with_head=with_head)
    names = _trunk_names(checkpoint, stored.family)
    config = _tied_as_stored(config, checkpoint, names.lm_head)
    with torch.device("meta"):
        trunk = Trunk(config if with_layers else replace(config, layers=()), 1, kind)
    tensors = trunk_tensors(checkpoint, stored.family, stored.head_names, notes)
    if not with_layers:
        layers = names.layer.partition("{")[0]
        tensors = {n: source for n, source in tensors.items() if not n.startswith(layers)}
    check_size(trunk, tensors)
    head = None if stored.head is None else head_modules(stored.head, config, layout)
    model = LoadedModel(checkpoint, config, trunk, head, kind, place, max_len, ())
    held = (holds or plain_modules_hold)(model)
    loading = Loading(place, kind, held.trunk, held.why_not, held.experts)
    notes += fill_trunk(trunk, tensors, loading, max_len, names)
    if stored.head is None or head is None:
        return replace(model, notes=tuple(notes))
    as_head = HeadLoading(replace(loading, forms=held.head), layout, draft_lm_head)
    notes += load_stored_head(head, stored.head, config, as_head, max_len)
    return replace(model, notes=tuple(notes), head_loading=as_head)


def build_another_head(model: LoadedModel, folder: Path) -> MTPHead:
    """A head that could take the place of a model's own, loaded as that one was.

    Refused before its tensors are read where it has another geometry or is run otherwise.
    """
    if model.head is None or model.head_loading is None:
        raise ConfigError(
            "the model runs without a head, so another one has no place to go to. Start it with a "
            "head."
        )
    stored = _given_head(model.checkpoint, folder)
    head = head_modules(stored, model.config, model.head_loading.layout)
    check_same_geometry(model.head, head, folder)
    load_stored_head(head, stored, model.config, model.head_loading, model.max_len)
    return head


def plain_modules_hold(model: LoadedModel) -> Held:
    """Every form that `models/quantized.py` computes with."""
    if model.dtype == torch.float64:
        return Held(why_not="numbers are float64")
    return Held(FORMS, FORMS)


def _own_length(config: ModelConfig, dtype: torch.dtype, notes: list[str]) -> int:
    """The model's own, less where tables for it would take much memory unasked."""
    ropes = {config.rope, config.rope_of_head}
    if config.sliding is not None:
        ropes.add(config.sliding.rope)
    if config.compressed is not None:
        ropes.add(config.compressed.far_rope)
    most = _TABLE_BYTES // max(1, sum(table_bytes(rope, dtype) for rope in ropes))
    if config.max_positions <= most:
        return config.max_positions
    notes.append(
        f"{most} of the model's {config.max_positions} positions (max_position_embeddings): tables "
        f"for more take over {_TABLE_BYTES / 2**30:g} GiB; --max-model-len allows them"
    )
    return most


def has_head(checkpoint: Checkpoint, folder: Path | None = None) -> bool:
    """Whether `build` would give a head, decided without loading anything."""
    return _find(checkpoint, folder, [], with_head=True).head is not None


def _find(
    checkpoint: Checkpoint, folder: Path | None, notes: list[str], *, with_head: bool
) -> _Stored:
    """The head that was asked for, else the checkpoint's own, else none (and a note)."""
    family = find_family(checkpoint)
    found = find_head_of(checkpoint, family) if family is not None else None
    names = frozenset(found.tensors.values()) if found is not None else frozenset()
    if folder is not None:
        return _Stored(family, _given_head(checkpoint, folder), names)
    if not with_head:
        return _Stored(family, None, names)
    if isinstance(checkpoint, PublishedModel) and checkpoint.why_no_head:
        raise HeadNotFound(checkpoint.why_no_head)
    if found is None or found.state in ("absent", "declared-but-missing"):
        notes.append("no head in the checkpoint: decoding runs without drafts")
        return _Stored(family, None, names)
    return _Stored(family, head_of(checkpoint, found=found), names)


def _given_head(checkpoint: Checkpoint, folder: Path) -> Head:
    head = open_head(folder, to_run=True)
    kind = checkpoint.config.model_type
    expected = GRAFTED_AS.get(kind, kind)
    if expected not in (head.family.name, *head.family.model_types, *head.family.marked_types):
        raise UnsupportedFamily(
            f"{folder} holds a {head.family.name} head, the model is {kind}. A head only fits "
            "the model it was made for; compare both with `headstart inspect`."
        )
    if not head.is_config_derived:
        return head
    # The keys of a GGUF file say less than the model's config, and no more than these of the model.
    for field in ("hidden_size", "vocab_size"):
        own, other = head.config.get(field), checkpoint.config.get(field)
        if own != other:
            raise ConfigError(
                f"{folder} is for a model with {field} {own}, the model has {other}. Take the head "
                "of this model."
            )
    return replace(head, config=checkpoint.config.raw)


def _trunk_names(checkpoint: Checkpoint, family: Family | None) -> TrunkNames:
    if family is None:
        return TrunkNames()
    own, prefix = family.trunk, trunk_prefix(checkpoint, family)
    heads = [name for name in own.lm_heads if name in checkpoint.tensors]
    return TrunkNames(
        prefix + own.embed, prefix + own.final_norm, (heads or own.lm_heads)[0],
        prefix + own.layer, prefix,
    )  # fmt: skip


def _tied_as_stored(config: ModelConfig, checkpoint: Checkpoint, lm_head: str) -> ModelConfig:
    """Of a nested config the top level may say that weights are tied, and the text part not."""
    claims = checkpoint.config.raw.get("tie_word_embeddings")
    is_missed = claims and not config.is_tied and lm_head not in checkpoint.tensors
    return replace(config, is_tied=True) if is_missed else config


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` as a device that this machine has."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError:
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device is {name!r}; give auto, cpu or cuda (cuda:1 for the second).", field="device"
        )
    count = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= count:
        raise ConfigError(
            f"device {name!r} was asked for and torch sees {count} GPUs. Use "
            "device auto or cpu, or a PyTorch that knows this machine's GPUs."
        )
    return place


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` or the name of a dtype that the device computes with."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(
            f"dtype is {name!r}; expected auto or {', '.join(_DTYPES)}.", field="dtype"
        )
    if _DTYPES[name] == torch.float16 and device.type == "cpu":
        raise ConfigError(
            "dtype float16 is for GPUs; on the CPU it is slow and overflows. Use float32."
        )
    return _DTYPES[name]
