"""From a checkpoint folder to modules on a device: trunk, head, weight formats.

Engine, training and scoring all load a model here, so that they run the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import ConfigError, UnsupportedFamily, some
from headstart.families.registry import GRAFTED_AS
from headstart.heads.detection import find_family, find_head_of
from headstart.heads.formats import open_head
from headstart.heads.head import Head, dequantize, head_of
from headstart.heads.quantization import dequantized, is_quantized, is_scale
from headstart.models.config import ModelConfig, model_config
from headstart.models.linear import quantize
from headstart.models.loading import load_head, load_trunk, materialize
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable
from headstart.models.trunk import Trunk
from headstart.models.tuning import tune

Weights = Literal["as-dtype", "int8"]
Layout = Literal["own", "vllm", "sglang"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


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
) -> Built:
    """Load trunk and head; what was decided on the way is in `notes`."""
    place = _device(device)
    kind = _dtype(dtype, place)
    config = model_config(checkpoint.config.fields)
    max_len = max_model_len or config.max_positions
    notes: list[str] = []
    found = _find_head(checkpoint, head_folder, notes) if with_head else None
    with torch.device("meta"):
        trunk = Trunk(config, 1, kind)
    materialize(trunk, place, kind)
    if config.is_tied:
        trunk.lm_head.weight = trunk.embed
    trunk.rotary = RotaryTable(config.rope, max_len, kind).to(place)
    load_trunk(trunk, _trunk_tensors(checkpoint))
    head = _load_head(found, config, kind, place, layout) if found is not None else None
    if weights == "int8":
        if place.type != "cpu":
            raise ConfigError("weights int8 is a CPU format; use dtype bfloat16 on a GPU.")
        quantize(trunk)
        if head is not None:
            quantize(head)
    elif place.type == "cpu":
        tune(*[module for module in (trunk, head) if module is not None])
    return Built(checkpoint, config, trunk, head, kind, place, max_len, tuple(notes))


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


def _trunk_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Published tensors of the trunk, dequantised where they are stored in 8 bits."""
    owner = find_family(checkpoint)
    head = set(find_head_of(checkpoint, owner).tensors.values()) if owner is not None else set()
    stored = {n: checkpoint.source(n) for n in checkpoint.tensors if n not in head}
    offsets = [name for name in stored if name.endswith("weight_zero_point")]
    if offsets:
        raise UnsupportedFamily(
            f"the weights have zero points ({some(offsets)}), which are not dequantised here; "
            "expected a symmetric scheme. Take another quantisation of the model."
        )
    return {
        name: dequantized(name, stored) if is_quantized(name, source) else source
        for name, source in stored.items()
        if not is_scale(name)
    }


def _load_head(
    head: Head, trunk: ModelConfig, dtype: torch.dtype, device: torch.device, run_as: Layout
) -> MTPHead:
    head = dequantize(head)
    config = model_config(Config(dict(head.config)).fields)
    if (config.hidden, config.vocab) != (trunk.hidden, trunk.vocab):
        raise ConfigError(
            f"the head is for hidden {config.hidden} and {config.vocab} tokens, the model has "
            f"{trunk.hidden} and {trunk.vocab}. Take the head of this model."
        )
    if (config.num_kv_heads, config.head_dim, config.rope) != (
        trunk.num_kv_heads, trunk.head_dim, trunk.rope,
    ):  # fmt: skip
        raise ConfigError(
            "the head's attention geometry or rotary settings differ from the trunk's."
        )
    layout = head.family.layout
    if run_as != "own":
        layout = layout.as_(run_as)
    with torch.device("meta"):
        module = MTPHead(replace(config, head_window=None), layout, head.num_modules)
    materialize(module, device, dtype)
    load_head(module, head.tensors, config)
    return module


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for and torch sees no GPU.")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected auto or {', '.join(_DTYPES)}.")
    return _DTYPES[name]
