"""THE place that says how each stored format is read: what stands beside a weight decides.

| beside each other | format | read by |
|---|---|---|
| `weight` F8, a scale of floats (or of bytes, for blocks) | FP8 | `floats.fp8` |
| `weight` F8, a scale of bytes | MXFP8 | `floats.mxfp8` |
| `weight` I8, `weight_scale` | 8-bit integers | `compressed.int8` |
| `weight` I8, a scale of bytes | MXFP4 as DeepSeek-V4 stores it | `floats.mxfp4` |
| `weight` U8, `weight_scale` F8, `weight_scale_2` | ModelOpt's NVFP4 | `floats.nvfp4` |
| `weight_packed` I32 | compressed-tensors, integers | `compressed.packed` |
| `weight_packed` U8 | compressed-tensors, NVFP4 or MXFP4 | `floats.nvfp4`, `floats.mxfp4` |
| `qweight` I32 | AWQ or GPTQ: the config says which | `integers.awq`, `integers.gptq` |
| `weight` of a block type (Q4_0, Q6_K, ...) | GGUF | `blocks.gguf_blocks` |
| `weight` U32, `scales`, `biases` | MLX's affine groups | `blocks.mlx_affine` |

Anything else is an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headstart.checkpoint.dtypes import BLOCK_TYPES
from headstart.checkpoint.quantized import blocks, compressed, floats, integers
from headstart.checkpoint.quantized.described import Described, described
from headstart.checkpoint.quantized.names import is_quantized, scale_of
from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.source import TensorSource
from headstart.errors import BadConfig, MissingTensor, ShapeMismatch, UnsupportedFamily

Tensors = Mapping[str, TensorSource]
# Beside a weight they stand for schemes that are not read: ModelOpt's AWQ, bitsandbytes.
_REFUSED = ("pre_quant_scale", "SCB", "weight.absmax")


def quantized_weights(
    tensors: Tensors,
    quantization: Mapping[str, Any],
    published: Callable[[str], str] = lambda name: name,
) -> dict[str, StoredWeight]:
    """Every quantised weight among `tensors`, by the name of the weight.

    `published` gives the name under which a config speaks of a tensor.
    """
    found = {}
    for name, source in tensors.items():
        if is_quantized(name, source):
            module = published(name).rpartition(".")[0]
            if source.dtype in BLOCK_TYPES or source.dtype == "U32":
                weight = _of_blocks_or_groups(name, module, tensors, quantization)
            else:
                weight = _weight(name, tensors, described(module, quantization))
            size = sum(tensors[part].num_bytes for part in weight.tensors)
            found[weight.name] = replace(weight, num_bytes=size)
    return found


def _of_blocks_or_groups(
    name: str, module: str, tensors: Tensors, quantization: Mapping[str, Any]
) -> StoredWeight:
    _check_matrix(name, tensors[name], (2, 3))
    if tensors[name].dtype in BLOCK_TYPES:
        return blocks.gguf_blocks(name, tensors)
    return blocks.mlx_affine(name, module, tensors, quantization)


def _check_matrix(name: str, source: TensorSource, ranks: tuple[int, ...]) -> None:
    if len(source.shape) not in ranks:
        raise ShapeMismatch(
            f"{name} is {source.dtype} of shape {source.shape}; expected a matrix"
            f"{', or a stack of them' if 3 in ranks else ''}. Download the checkpoint again."
        )


def _weight(name: str, tensors: Tensors, config: Described) -> StoredWeight:
    module, _, parameter = name.rpartition(".")
    source = tensors[name]
    _check_matrix(name, source, (2,) if parameter == "qweight" else (2, 3))
    _check_said(name, source, config)
    refuse = _refusal(name, source, config)
    if any(f"{module}.{other}" in tensors for other in _REFUSED):
        raise refuse
    if parameter == "qweight" and source.dtype == "I32":
        return _by_config(name, module, tensors, config)
    if parameter == "weight_packed":
        return _packed(name, module, tensors, config)
    scale = scale_of(name, tensors)
    if scale is None:
        if source.dtype.startswith("F8"):
            raise MissingTensor(
                f"{name} is {source.dtype} and no scale is beside it (weight_scale_inv, "
                "weight_scale), without which it cannot be read. Download the checkpoint again."
            )
        raise refuse
    has_powers = tensors[scale].dtype in floats.POWERS
    if source.dtype in ("F8_E4M3", "F8_E5M2"):
        if has_powers and not floats.has_blocks_of_powers(source, tensors[scale], config):
            return floats.mxfp8(name, scale, tensors)
        return floats.fp8(name, scale, tensors, config)
    if source.dtype == "I8" and parameter == "weight" and not has_powers:
        return compressed.int8(module, tensors, config)
    if source.dtype == "I8" and parameter == "weight" and config.kind is None:
        return floats.mxfp4(name, name, scale, tensors)
    whole = f"{module}.weight_scale_2"
    if source.dtype == "U8" and tensors[scale].dtype == "F8_E4M3":
        return floats.nvfp4(name, name, scale, whole, tensors, divides=False)
    raise refuse


def _check_said(name: str, source: TensorSource, config: Described) -> None:
    """Refuse what compressed-tensors' `type` or `format` calls otherwise than it is stored."""
    kind = "int" if source.dtype in ("I8", "I32") else "float"
    if config.kind is not None and config.kind != kind:
        raise BadConfig(
            f"{name} is stored as {source.dtype} and the config says type {config.kind!r}. Take "
            "config.json and weights from one release."
        )
    stored = name.rpartition(".")[2], source.dtype
    if config.stored_as is not None and config.stored_as != stored:
        raise BadConfig(
            f"{name} is stored as {source.dtype} and the format of the config stores "
            f"{' as '.join(config.stored_as)}. Take config.json and weights from one release."
        )


def _by_config(name: str, module: str, tensors: Tensors, config: Described) -> StoredWeight:
    if config.packing is None:
        raise UnsupportedFamily(
            f"{name} may be packed by AWQ or GPTQ and the config names {config.method or 'neither'}"
            "; expected quant_method awq or gptq, or auto-round with a packing_format of integers. "
            "Take config.json and weights from one release."
        )
    return (integers.awq if config.packing == "awq" else integers.gptq)(module, tensors, config)


def _packed(name: str, module: str, tensors: Tensors, config: Described) -> StoredWeight:
    source, weight, scale = tensors[name], f"{module}.weight", f"{module}.weight_scale"
    if source.dtype == "I32":
        return compressed.packed(module, tensors, config)
    if source.dtype == "U8" and scale in tensors:
        if tensors[scale].dtype in floats.POWERS:
            return floats.mxfp4(weight, name, scale, tensors)
        if tensors[scale].dtype == "F8_E4M3":
            whole = f"{module}.weight_global_scale"
            return floats.nvfp4(weight, name, scale, whole, tensors, divides=True)
    raise _refusal(name, source, config)


def _refusal(name: str, source: TensorSource, config: Described) -> UnsupportedFamily:
    return UnsupportedFamily(
        f"{name} is stored as {source.dtype} in a scheme that cannot be dequantised here "
        f"(quant_method {config.method or 'none'}); expected FP8, integers in groups "
        "(AWQ, GPTQ, AutoRound, compressed-tensors), NVFP4, MXFP4 or MXFP8. Formats that keep the "
        "quantisation config (sglang, headstart) carry such tensors as they are."
    )
