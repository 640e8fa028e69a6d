"""Which models the compiled kernels of a CPU run, decided without loading numba where possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headstart.backends.numba.compiler import why_missing
from headstart.backends.options import BackendOptions
from headstart.models.build import LoadedModel
from headstart.models.config import LayerKind, ModelConfig

_LANES = 16  # numbers in a vector: heads are multiples of it


def why_not(model: LoadedModel, options: BackendOptions) -> str | None:
    """What keeps a model from running through the compiled kernels, or None."""
    if model.device.type != "cpu":
        return f"the device is {model.device}"
    if options.kernels != "auto":
        return f"kernels are {options.kernels}"
    if options.kv_dtype == "fp8":
        return "K/V in fp8 are rounded by plain PyTorch"
    if options.exact:
        return "exact runs in plain PyTorch on a CPU"
    return why_missing() or why_not_whole(model)


def why_not_whole(model: LoadedModel) -> str | None:
    """What in a model the kernels cannot run, or None."""
    if model.dtype != torch.float32:
        return f"numbers are {model.dtype}"
    reason = why_unsupported(model.config, model.config.layers)
    if reason is None and model.head is not None:
        reason = why_unsupported(model.head.config, [model.head.config.head_layer])
    return reason


def why_unsupported(config: ModelConfig, kinds: Sequence[LayerKind]) -> str | None:
    """What in layers of these kinds the kernels cannot run, or None."""
    if config.streams is not None:
        return "the model has several residual streams"
    if any(kind.mixer != "attention" for kind in kinds):
        other = next(kind.mixer for kind in kinds if kind.mixer != "attention")
        return f"the model has layers with {other} attention"
    if any(kind.norms == "after" for kind in kinds):
        return "the model norms what attention and MLPs give"
    if any(kind.feed != "dense" for kind in kinds):
        return "the model has experts"
    if not config.gated_mlp or config.rope.dim == 0:
        return "the model has MLPs without gates, or attention that does not rotate"
    if any(kind.limit is not None or kind.shared_limit is not None for kind in kinds):
        return "the model cuts off inner products"
    if any(window is not None for window in config.windows):
        return "the model has sliding windows"
    if config.v_dim != config.head_dim or config.v_scale != 1:
        return "the model's values have a size or a scale of their own"
    if config.gated_attention or config.head_gate:
        return "the model has gates behind attention"
    if config.qk_norm:
        return "the model norms queries and keys"
    if config.head_dim % _LANES:
        return f"the model has heads of size {config.head_dim}, no multiple of {_LANES}"
    if config.rope.is_interleaved:
        return "the model uses interleaved rotary embeddings"
    return None
