"""From a checkpoint folder to modules on a device: trunk, head, weight formats.

Engine, training and scoring all load a model here, so that they run the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstart.assembly.forms import (
    FORMS,
    Weights,
    can_compile,
    fastest_form,
    why_not_compiled,
)
from headstart.assembly.stored_head import Layout, load_stored_head
from headstart.assembly.threads import set_threads
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.errors import ConfigError, UnsupportedFamily, some
from headstart.families.registry import GRAFTED_AS
from headstart.heads.detection import find_family, find_head_of
from headstart.heads.formats import open_head
from headstart.heads.head import Head, head_of
from headstart.heads.quantization import dequantized, is_quantized, is_scale, scale_of
from headstart.heads.sharing import trunk_prefix
from headstart.models.config import ModelConfig, model_config
from headstart.models.exact import make_exact
from headstart.models.linear import Int8Linear, quantize
from headstart.models.loading import load_trunk, materialize
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk
from headstart.models.tuning import tune

_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "float16": torch.float16,
}  # fmt: skip
# Scales of what this engine keeps in full precision: activations, keys and values.
_UNUSED_SCALES = {
    "activations": ("input_scale", "input_global_scale"),
    "keys and values": ("k_scale", "v_scale", "q_scale", "kv_scale"),
}


@dataclass(frozen=True)
class Built:
    """A model in memory, with its head if there is one."""

    checkpoint: Checkpoint
    config: ModelConfig
    trunk: Trunk
    head: MTPHead | None
    dtype: torch.dtype
    device: torch.device
    max_len: int
    notes: tuple[str, ...]


def build(
    checkpoint: Checkpoint,
    head_folder: Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: Weights = "as-dtype",
    max_model_len: int | None = None,
    layout: Layout = "own",
    with_head: bool = True,
    is_exact: bool = False,
    measure_threads: bool = False,
    asks_for_kernels: bool = False,
    refuses_kernels: bool = False,
    packs_floats: bool = False,
) -> Built:
    """Load trunk and head; what was decided on the way is in `notes`.

    `measure_threads` may change the number of CPU threads, a setting of the whole process.
    `asks_for_kernels`: a GPU's formats are wanted on a CPU, too, where kernels are interpreted.
    `refuses_kernels`: int8 products of a CPU are torch's, not the compiled kernels'.
    `packs_floats`: float32 may be held as the compiled kernels read it; then nothing else can.
    """
    place = _device(device)
    kind = _dtype(dtype, place)
    by_blocks = is_exact and place.type == "cpu" and not asks_for_kernels
    _check_formats(place, kind, weights, by_blocks)
    if weights == "fp8" and place.type == "cpu" and not asks_for_kernels:
        raise ConfigError("weights fp8 is a GPU format; use weights int8 on a CPU.")
    config = _config(checkpoint)
    max_len = max_model_len or config.max_positions
    if max_len > config.max_positions:
        raise ConfigError(
            f"max_model_len is {max_len}; the model was made for {config.max_positions} positions "
            "(max_position_embeddings). Give at most that."
        )
    notes: list[str] = []
    found = _find_head(checkpoint, head_folder, notes) if with_head else None
    with torch.device("meta"):
        trunk = Trunk(config, 1, kind)
    materialize(trunk, place, kind)
    if config.is_tied:
        trunk.lm_head.weight = trunk.embed
    trunk.rotate_up_to(max_len, kind)
    trunk.to(place)
    load_trunk(trunk, _trunk_tensors(checkpoint, notes), **_names(checkpoint))
    head = (
        load_stored_head(found, config, kind, place, layout, max_len) if found is not None else None
    )
    modules = [module for module in (trunk, head) if module is not None]
    if weights != "as-dtype":
        form = FORMS[weights] if refuses_kernels else fastest_form(weights)
        for module in modules:
            quantize(module, form)
        if place.type == "cuda":
            torch.cuda.empty_cache()  # what was replaced counts as free memory
    elif packs_floats and not by_blocks and can_compile(trunk, head, kind):
        from headstart.backends.numba.linear import PackedFloat

        for module in modules:
            quantize(module, PackedFloat)
    if place.type == "cpu":
        reason = why_not_compiled(trunk, head, kind)
        if isinstance(trunk.lm_head, Int8Linear) and not refuses_kernels and reason:
            notes.append(f"int8 kernels compute no whole layers here: {reason}")
        if measure_threads and (
            note := set_threads(trunk, is_tuned=not by_blocks, is_compiled=reason is None)
        ):
            notes.append(note)
        if by_blocks:
            make_exact(trunk)
        if reason is not None or isinstance(trunk.lm_head, Int8Linear):
            tune(*(modules[1:] if by_blocks else modules))
    return Built(checkpoint, config, trunk, head, kind, place, max_len, tuple(notes))


def _config(checkpoint: Checkpoint) -> ModelConfig:
    config = model_config(checkpoint.config.fields)
    # Of a nested config the top level may say it, and the text part a default.
    if checkpoint.config.raw.get("tie_word_embeddings") and not config.is_tied:
        stored = _names(checkpoint)["lm_head"] in checkpoint.tensors
        return config if stored else replace(config, is_tied=True)
    return config


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """What this checkpoint calls its trunk, where releases of the family differ."""
    owner = find_family(checkpoint)
    if owner is None:
        return {"prefix": "model.", "lm_head": "lm_head.weight"}
    heads = [name for name in owner.trunk.lm_heads if name in checkpoint.tensors]
    lm_head = heads[0] if heads else owner.trunk.lm_heads[0]
    return {"prefix": trunk_prefix(checkpoint, owner), "lm_head": lm_head}


def has_head(checkpoint: Checkpoint, folder: Path | None = None) -> bool:
    """Whether `build` would give a head, told without loading anything."""
    return _find_head(checkpoint, folder, []) is not None


def _find_head(checkpoint: Checkpoint, folder: Path | None, notes: list[str]) -> Head | None:
    """The head that was asked for, else the checkpoint's own, else none (and a note)."""
    if folder is not None:
        head = open_head(folder)
        kind = checkpoint.config.model_type
        expected = GRAFTED_AS.get(kind, kind)
        if expected not in (head.family.name, *head.family.model_types):
            raise UnsupportedFamily(
                f"{folder} holds a {head.family.name} head, the model is {kind}. A head only fits "
                "the model it was made for; compare both with `headstart inspect`."
            )
        return head
    owner = find_family(checkpoint)
    found = find_head_of(checkpoint, owner) if owner is not None else None
    if found is None or found.state in ("absent", "declared-but-missing"):
        notes.append("no head in the checkpoint: decoding runs without drafts")
        return None
    return head_of(checkpoint)


def _trunk_tensors(checkpoint: Checkpoint, notes: list[str]) -> dict[str, TensorSource]:
    """Published tensors of the trunk, dequantised where they are stored in 8 bits."""
    owner = find_family(checkpoint)
    head = set(find_head_of(checkpoint, owner).tensors.values()) if owner is not None else set()
    elsewhere = owner.trunk.beside if owner is not None else ()
    pictures = {name for name in checkpoint.tensors if name.startswith(elsewhere)}
    if pictures:
        notes.append(f"text only: {len(pictures)} tensors of the vision part are not loaded")
    left_out = head | pictures
    stored = {n: checkpoint.source(n) for n in checkpoint.tensors if n not in left_out}
    offsets = [name for name in stored if name.endswith("weight_zero_point")]
    if offsets:
        raise UnsupportedFamily(
            f"the weights have zero points ({some(offsets)}), which are not dequantised here; "
            "expected a symmetric scheme. Take another quantisation of the model."
        )
    quantized = [name for name, source in stored.items() if is_quantized(name, source)]
    for name in quantized:
        _refuse_groups(name, stored)
    result = {
        name: dequantized(name, stored) if name in quantized else source
        for name, source in stored.items()
        if not is_scale(name)
    }
    used = {scale_of(name, stored) for name in quantized}
    left = [name for name in stored if is_scale(name) and name not in used]
    for what, endings in _UNUSED_SCALES.items():
        own = [name for name in left if name.rpartition(".")[2] in endings]
        if own:
            notes.append(f"{what} stay unquantised here; not used: {some(own)}")
        left = [name for name in left if name not in own]
    beside = {scale_of(name, stored) for name in result if name not in quantized}
    stale = [name for name in left if name in beside]
    if stale:
        notes.append(f"not applied, their weights are stored unquantised: {some(stale)}")
    # Anything else is refused by name when the trunk is filled.
    return {**result, **{name: stored[name] for name in left if name not in stale}}


def _refuse_groups(name: str, stored: Mapping[str, TensorSource]) -> None:
    scale = stored.get(scale_of(name, stored) or "")
    if scale is None or len(scale.shape) != 2 or len(stored[name].shape) != 2:
        return
    rows, columns = stored[name].shape
    groups = scale.shape[1]
    if scale.shape[0] == rows > 1 and groups > 1 and columns % groups == 0:
        raise UnsupportedFamily(
            f"{name} is quantised in groups of {columns // groups} columns ({groups} scales per "
            "row), which is not dequantised here; expected one scale per row, per 128x128 block "
            "or per tensor. Take another quantisation of the model."
        )


def _check_formats(
    device: torch.device, dtype: torch.dtype, weights: Weights, by_blocks: bool
) -> None:
    """Combinations of device and number format that do not exist here.

    `by_blocks`: exact by plain products; the kernels of a GPU are exact in another way.
    """
    if weights == "int8" and device.type != "cpu":
        raise ConfigError("weights int8 is a CPU format; use weights fp8 on a GPU.")
    if dtype == torch.float16 and device.type == "cpu":
        raise ConfigError(
            "dtype float16 is for GPUs; on the CPU it is slow and overflows. Use float32."
        )
    if by_blocks and dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"on a CPU exact is for float32 and float64, not for {dtype}. Change dtype, or leave "
            "exact out."
        )
    if by_blocks and weights != "as-dtype":
        raise ConfigError(f"exact needs weights as they are, not {weights}. Leave one of them out.")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError:
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; give auto, cpu or cuda (cuda:1 for the second).")
    count = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= count:
        raise ConfigError(
            f"device {name!r} was asked for and torch sees {count} GPUs. Use "
            "device auto or cpu, or a PyTorch that knows this machine's GPUs."
        )
    return place


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected auto or {', '.join(_DTYPES)}.")
    return _DTYPES[name]
