"""Which models the fused kernels run, decided without loading Triton."""

from __future__ import annotations

import importlib.util

import torch

from headstart.backends.options import BackendOptions
from headstart.models.build import LoadedModel
from headstart.models.config import ModelConfig
from headstart.models.mla_config import MlaConfig

_WIDEST_FP32 = 128  # of heads: wider ones do not fit into a GPU's shared memory
# What a program of latent attention has room for, in registers and in shared memory.
_WIDEST_LATENT, _WIDEST_ROTATED, _WIDEST_HEAD = 512, 64, 256


_FP8_CAPABILITY = (8, 9)  # of GPUs that multiply 8-bit floats


def has_fp8(device: torch.device) -> bool:
    """Whether products of 8-bit floats run there; the interpreter has them."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def why_not(model: LoadedModel, options: BackendOptions) -> str | None:
    """What keeps a model from running through the kernels, or None.

    With `kernels="on"` they run on a CPU, too, in Triton's interpreter.
    """
    if options.kernels == "off":
        return "kernels are off"
    if options.kernels == "auto" and model.device.type != "cuda":
        return f"the device is {model.device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    config, head = model.config, model.head
    if model.dtype == torch.float64:
        return "numbers are float64"
    widest = max(config.head_dim, 0 if config.sliding is None else config.sliding.dim)
    if model.dtype == torch.float32 and widest > _WIDEST_FP32:
        return f"numbers are float32 and heads of size {widest}"
    if options.weights == "int8":
        return "weights are int8"
    if options.weights == "fp8" and not has_fp8(model.device):
        return "the GPU does not multiply 8-bit floats (compute capability 8.9 or more does)"
    if options.kv_dtype == "fp8" and not has_fp8(model.device):
        return "the GPU does not convert 8-bit floats (compute capability 8.9 or more does)"
    if options.kv_dtype == "fp8" and _has_windows(config):
        return "the model has windows or values of another size, whose K/V are as they are"
    if options.exact and config.recurrent is not None:
        return f"{config.model_type} models have recurrent layers, whose kernels are inexact"
    reasons = map(why_unsupported, [config, *([head.config] if head is not None else [])])
    return next((reason for reason in reasons if reason is not None), None)


def why_unsupported(config: ModelConfig) -> str | None:
    """What in a trunk or a head the kernels cannot run, or None."""
    if config.o_bias or config.mlp_bias:
        return "the model has biases after attention or in the MLP"
    kinds = (*config.layers, config.head_layer)
    if config.streams is not None:
        return f"{config.model_type} models have several residual streams"
    if config.mamba is not None:
        return f"{config.model_type} models have Mamba layers"
    if not config.gated_mlp or any("none" in (kind.mixer, kind.feed) for kind in kinds):
        return "the model has MLPs without gates, or layers that are a mixer or an MLP alone"
    if any(kind.norms == "after" for kind in kinds):
        return "the model norms what attention and MLPs give"
    if any(kind.limit is not None or kind.shared_limit is not None for kind in kinds):
        return "the model cuts off inner products"
    if config.delta is not None and config.delta.by_channel:
        return f"channels of {config.model_type} models' memories fade each by itself"
    if config.mla is not None:
        return _why_no_latents(config.mla, config.model_type)
    for shape in {config.shape(kind) for kind in kinds if kind.attends}:
        if shape.dim % 2 or shape.dim > _WIDEST_HEAD:
            return f"the model has heads of size {shape.dim}"
        if shape.v_dim > shape.dim:
            return f"the model's values have {shape.v_dim} numbers and its keys {shape.dim}"
    return None


def _has_windows(config: ModelConfig) -> bool:
    """Whether some layer of trunk or head has a window, sinks, or values of another size."""
    has_window = any(window is not None for window in config.windows)
    return has_window or config.sliding is not None or config.v_dim != config.head_dim


def _why_no_latents(config: MlaConfig, model_type: str) -> str | None:
    """What in latent attention the kernels cannot run, or None."""
    if config.index is not None and config.index.pool is not None:
        return f"{model_type} models choose pools of tokens by an indexer"
    if config.is_gated or config.has_sinks or config.rope_dim == 0:
        return f"{model_type} models have gates or sinks, or no positions, in latent attention"
    if config.kv_rank > _WIDEST_LATENT or config.rope_dim > _WIDEST_ROTATED:
        return f"the model keeps latents of {config.kv_rank} + {config.rope_dim} numbers"
    widest = max(config.nope_dim, config.v_dim)
    return f"the model has heads of size {widest}" if widest > _WIDEST_HEAD else None
