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
    if model.dtype == torch.float32 and config.head_dim > _WIDEST_FP32:
        return f"numbers are float32 and heads of size {config.head_dim}"
    if options.weights == "int8":
        return "weights are int8"
    if options.weights == "fp8" and not has_fp8(model.device):
        return "the GPU does not multiply 8-bit floats (compute capability 8.9 or more does)"
    if options.kv_dtype == "fp8" and not has_fp8(model.device):
        return "the GPU does not convert 8-bit floats (compute capability 8.9 or more does)"
    if options.exact and config.mla is not None:
        return f"{config.model_type} models have latent attention, whose kernels are inexact"
    if options.exact and config.recurrent is not None:
        return f"{config.model_type} models have recurrent layers, whose kernels are inexact"
    if head is not None and head.num_modules > 1 and head.layout.topology == "parallel":
        return f"the head has {head.num_modules} modules, which all read the trunk's states"
    reasons = map(why_unsupported, [config, *([head.config] if head is not None else [])])
    return next((reason for reason in reasons if reason is not None), None)


def why_unsupported(config: ModelConfig) -> str | None:
    """What in a trunk or a head the kernels cannot run, or None."""
    if config.o_bias or config.mlp_bias:
        return "the model has biases after attention or in the MLP"
    if any(window is not None for window in config.windows) or config.sliding is not None:
        return "the model has sliding windows"
    if config.v_dim != config.head_dim or config.v_scale != 1 or config.head_gate:
        return "the model's values have a size, a scale or a gate of their own"
    kinds = (*config.layers, config.head_layer)
    if config.streams is not None:
        return f"{config.model_type} models have several residual streams"
    if config.mamba is not None:
        return f"{config.model_type} models have Mamba layers"
    if not config.gated_mlp or any("none" in (kind.mixer, kind.feed) for kind in kinds):
        return "the model has MLPs without gates, or layers that are a mixer or an MLP alone"
    if any(kind.norms == "after" for kind in kinds):
        return "the model norms what attention and MLPs give"
    if config.rope.dim == 0:
        return "the model's attention does not rotate"
    if any(kind.limit is not None or kind.shared_limit is not None for kind in kinds):
        return "the model cuts off inner products"
    if config.delta is not None and config.delta.by_channel:
        return f"channels of {config.model_type} models' memories fade each by itself"
    if config.mla is not None:
        return _why_no_latents(config.mla, config.model_type)
    if config.head_dim % 2 or config.head_dim > 256:
        return f"the model has heads of size {config.head_dim}"
    return None


def _why_no_latents(config: MlaConfig, model_type: str) -> str | None:
    """What in latent attention the kernels cannot run, or None."""
    if config.index is not None:
        return f"{model_type} models choose what a row sees by an indexer"
    if config.kv_rank > _WIDEST_LATENT or config.rope_dim > _WIDEST_ROTATED:
        return f"the model keeps latents of {config.kv_rank} + {config.rope_dim} numbers"
    widest = max(config.nope_dim, config.v_dim)
    return f"the model has heads of size {widest}" if widest > _WIDEST_HEAD else None
