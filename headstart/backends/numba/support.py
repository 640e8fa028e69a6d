"""Which models the compiled kernels of a CPU run, decided without loading numba where possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headstart.backends.numba.compiler import why_missing
from headstart.backends.options import BackendOptions
from headstart.models.build import LoadedModel
from headstart.models.config import LayerKind, ModelConfig

_MIXERS = {"attention", "sliding", "latent", "delta"}


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
        if model.head.layout.out_norm_mean != "kept":
            return "the head's out norm subtracts a mean"
        reason = why_unsupported(model.head.config, [model.head.config.head_layer])
    return reason


def why_unsupported(config: ModelConfig, kinds: Sequence[LayerKind]) -> str | None:
    """What in layers of these kinds the kernels cannot run, or None."""
    if config.streams is not None:
        return "the model has several residual streams"
    mixers = {kind.mixer for kind in kinds}
    if mixers - _MIXERS:
        other = sorted(mixers - _MIXERS)[0]
        if other == "none":
            return "the model has attention and MLPs in layers of their own"
        return f"the model has layers with {other} attention"
    if any(kind.feed == "none" for kind in kinds):
        return "the model has attention and MLPs in layers of their own"
    if any(kind.norms == "after" for kind in kinds):
        return "the model norms what attention and MLPs give"
    if not config.gated_mlp:
        return "the model has MLPs without gates"
    if "delta" in mixers and config.delta is not None and config.delta.by_channel:
        return "the model has delta attention whose channels fade each by itself"
    if "latent" in mixers and config.mla is not None:
        if config.mla.index is not None:
            return "the model chooses what rows see by an indexer"
        if config.mla.is_gated:
            return "the model has gates behind latent attention"
    return None
