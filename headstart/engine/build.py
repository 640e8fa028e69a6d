"""From a checkpoint folder to modules on a device: trunk, head, formats, memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError, EngineError, UnsupportedFamily, some
from headstart.families.registry import GRAFTED_AS
from headstart.heads.detection import find_family, find_head_of
from headstart.heads.formats import open_head
from headstart.heads.head import Head, dequantize, head_of
from headstart.heads.quantization import dequantized, is_quantized, is_scale
from headstart.models.config import ModelConfig, model_config
from headstart.models.linear import quantize
from headstart.models.loading import load_head, load_trunk, materialize
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk
from headstart.models.tuning import tune

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Built:
    """Everything an engine needs, loaded."""

    checkpoint: Checkpoint
    config: ModelConfig
    trunk: Trunk
    head: MTPHead | None
    dtype: torch.dtype
    device: torch.device
    max_len: int
    notes: tuple[str, ...]


def build(checkpoint: Checkpoint, head_folder: Path | None, options: EngineOptions) -> Built:
    """Load trunk and head; what was decided on the way is in `notes`."""
    device = _device(options)
    dtype = _dtype(options, device)
    config = model_config(checkpoint.config.fields)
    max_len = options.max_model_len or config.max_positions
    notes: list[str] = []
    found = _find_head(checkpoint, head_folder, notes) if options.speculate != 0 else None
    with torch.device("meta"):
        trunk = Trunk(config, 1, dtype)
    materialize(trunk, device, dtype)
    if config.is_tied:
        trunk.lm_head.weight = trunk.embed
    trunk.rotary = _rotary(config, max_len, dtype, device)
    load_trunk(trunk, _trunk_tensors(checkpoint))
    head = _load_head(found, config, dtype, device, options) if found is not None else None
    if options.weights == "int8":
        if device.type != "cpu":
            raise ConfigError("weights int8 is a CPU format; use dtype bfloat16 on a GPU.")
        quantize(trunk)
        if head is not None:
            quantize(head)
    elif device.type == "cpu":
        tune(*[module for module in (trunk, head) if module is not None])
    return Built(checkpoint, config, trunk, head, dtype, device, max_len, tuple(notes))


def _rotary(config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> Any:
    from headstart.models.rope import RotaryTable

    return RotaryTable(config.rope, max_len, dtype).to(device)


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
    head: Head, trunk: ModelConfig, dtype: torch.dtype, device: torch.device, options: EngineOptions
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
    if options.layout != "own":
        layout = layout.as_(options.layout)
    with torch.device("meta"):
        module = MTPHead(replace(config, head_window=None), layout, head.num_modules)
    materialize(module, device, dtype)
    load_head(module, head.tensors, config)
    return module


def _device(options: EngineOptions) -> torch.device:
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device!r} was asked for and torch sees no GPU.")
    return torch.device(options.device)


def _dtype(options: EngineOptions, device: torch.device) -> torch.dtype:
    if options.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if options.dtype not in _DTYPES:
        raise ConfigError(f"dtype is {options.dtype!r}; expected auto or {', '.join(_DTYPES)}.")
    return _DTYPES[options.dtype]


def num_blocks(built: Built, options: EngineOptions) -> tuple[int, int]:
    """How many K/V blocks there is memory for, and the bytes of one."""
    config = built.config
    layers = config.num_layers + (built.head.num_modules if built.head else 0)
    token = 2 * config.num_kv_heads * config.head_dim * built.dtype.itemsize * layers
    states = (built.head.num_modules if built.head else 0) * config.hidden * built.dtype.itemsize
    block = token * options.block_size + states
    budget = options.kv_bytes or int(_free_bytes(built.device) * options.memory_fraction)
    # More than all requests at full length could ever hold is of no use; a request keeps a slot
    # for the token that its last row gives.
    most = options.max_running_requests * -(-(built.max_len + 1) // options.block_size)
    count = min(budget // block, most)
    if count < 1:
        raise EngineError(
            f"one K/V block needs {block:,} bytes and there are {budget:,}. Raise kv_bytes or "
            "memory_fraction, or lower block_size."
        )
    return int(count), block


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
