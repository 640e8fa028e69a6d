"""Matrices rounded to nearest (`nearest.py`) and laid down as published formats store them.

What is written here is read back by `reading.py` and by other engines. The tensors of a module are
made together and its small ones are kept until they are written; a file has tensors of one size of
type after another, so its codes are made again when their turn comes, not kept. Memory is bounded
by one matrix and the scales and zero points of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.quantized import nearest
from headstart.checkpoint.quantized.nearest import BITS
from headstart.checkpoint.quantized.packing import WORD
from headstart.checkpoint.quantized.weights import FP8_BLOCK
from headstart.checkpoint.reader import torch_dtype
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load

if TYPE_CHECKING:
    import torch

    Make = Callable[[torch.Tensor, int], dict[str, torch.Tensor]]
Layout = dict[str, tuple[str, tuple[int, ...]]]  # suffix -> dtype and shape
_PACKED = WORD // BITS
GROUPS = (128, 64, 32)  # sizes that kernels of other engines have


@dataclass(frozen=True)
class WrittenFormat:
    """How one format stores a matrix, and what its config says."""

    layout: Callable[[int, int, int], Layout]  # of a matrix [N, K] in groups of g
    make: Make  # values fp32 [N, K] and g -> tensors by suffix
    config: Callable[[int], dict[str, Any]]  # quantization_config, without its list of modules
    groups: tuple[int, ...] = GROUPS  # sizes that it may have, of which K is a whole number
    outputs: int = 1  # N has to be a multiple of: outputs that share a word
    quantizes_head: bool = False  # whether releases quantise the head's block, too


def stored_in(
    form: WrittenFormat, module: str, source: TensorSource, group: int
) -> dict[str, TensorSource]:
    """The tensors of a module whose plain weight [N, K] is `source`."""
    rows, columns = source.shape
    layout = form.layout(rows, columns, group)
    codes = max(layout, key=lambda suffix: byte_size(*layout[suffix]))
    left, kept = set(layout), dict[str, "torch.Tensor"]()  # not written yet; of these, made

    def made(suffix: str) -> torch.Tensor:
        import torch

        left.discard(suffix)
        tensor = kept.pop(suffix, None)
        if tensor is None:
            found = form.make(load(source).to(torch.float32), group)
            tensor = found[suffix]
            kept.update({name: found[name] for name in left if name != codes})
        if not left:  # all are written: what is asked for again is made again
            left.update(layout)
        return tensor

    def one(suffix: str, dtype: str) -> Callable[[], Iterator[memoryview]]:
        def pieces() -> Iterator[memoryview]:
            tensor = made(suffix)
            assert tensor.dtype == torch_dtype(dtype), f"{module}.{suffix} is {tensor.dtype}"
            yield as_bytes(tensor)

        return pieces

    return {
        f"{module}.{suffix}": TensorSource(dtype, shape, one(suffix, dtype), is_copy=False)
        for suffix, (dtype, shape) in layout.items()
    }


def compressed_group(weights: Mapping[str, Any], activations: Any, form: str) -> dict[str, Any]:
    """A group of a config of compressed-tensors, without its targets."""
    return {
        "weights": dict(weights), "input_activations": activations, "output_activations": None,
        "format": form,
    }  # fmt: skip


def compressed_config(groups: Mapping[str, Any], form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": dict(groups),
    }  # fmt: skip


def _compressed(group: Mapping[str, Any]) -> dict[str, Any]:
    own = {"targets": ["Linear"], **group}
    return compressed_config({"group_0": own}, str(own["format"]))


def _weights(bits: int, kind: str, strategy: str, group: int | None = None) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy,
        "group_size": group, "dynamic": False, "actorder": None, "observer": "minmax",
    }  # fmt: skip


def _rows_of(bits: int, kind: str) -> dict[str, Any]:
    """Activations that are rounded row by row while a model runs."""
    return {**_weights(bits, kind, "token"), "dynamic": True, "observer": None}


# What `quantize` writes: groups of a config by the name of their number format.
COMPRESSED_GROUPS: dict[str, Callable[[int], dict[str, Any]]] = {
    "4": lambda g: compressed_group(_weights(BITS, "int", "group", g), None, "pack-quantized"),
    "8": lambda g: compressed_group(
        _weights(8, "int", "channel"), _rows_of(8, "int"), "int-quantized"
    ),
    "fp8": lambda g: compressed_group(
        _weights(8, "float", "channel"), _rows_of(8, "float"), "float-quantized"
    ),
}
_NVFP4 = {**_weights(BITS, "float", "tensor_group", 16), "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4 = {**_weights(BITS, "float", "group", 32), "scale_dtype": "torch.uint8"}

FORMATS: dict[str, WrittenFormat] = {
    "fp8-block": WrittenFormat(
        lambda n, k, g: {
            "weight": ("F8_E4M3", (n, k)),
            "weight_scale_inv": ("F32", (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))),
        },
        nearest.fp8_block,
        lambda g: {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
        groups=(), quantizes_head=True,
    ),
    "fp8-row": WrittenFormat(
        lambda n, k, g: {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("F32", (n, 1))},
        nearest.fp8_row,
        lambda g: _compressed(COMPRESSED_GROUPS["fp8"](g)),
        groups=(), quantizes_head=True,
    ),
    "fp8-tensor": WrittenFormat(
        lambda n, k, g: {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("F32", (1,))},
        nearest.fp8_tensor,
        lambda g: _compressed(
            compressed_group(
                _weights(8, "float", "tensor"), _rows_of(8, "float"), "float-quantized"
            )
        ),
        groups=(), quantizes_head=True,
    ),
    "int8-row": WrittenFormat(
        lambda n, k, g: {"weight": ("I8", (n, k)), "weight_scale": ("F32", (n, 1))},
        nearest.int8_row,
        lambda g: _compressed(COMPRESSED_GROUPS["8"](g)),
        groups=(),
    ),
    "awq": WrittenFormat(
        lambda n, k, g: {
            "qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (k // g, n // 8)),
            "scales": ("F16", (k // g, n)),
        },
        nearest.awq,
        lambda g: {
            "quant_method": "awq", "bits": BITS, "group_size": g, "zero_point": True,
            "version": "gemm",
        },
        outputs=_PACKED,
    ),
    "gptq": WrittenFormat(
        lambda n, k, g: {
            "qweight": ("I32", (k // 8, n)), "qzeros": ("I32", (k // g, n // 8)),
            "scales": ("F16", (k // g, n)), "g_idx": ("I32", (k,)),
        },
        nearest.gptq,
        lambda g: {
            "quant_method": "gptq", "bits": BITS, "group_size": g, "sym": True,
            "desc_act": False, "lm_head": False, "checkpoint_format": "gptq",
        },
        outputs=_PACKED,
    ),
    "auto-round": WrittenFormat(
        lambda n, k, g: {
            "qweight": ("I32", (k // 8, n)), "qzeros": ("I32", (k // g, n // 8)),
            "scales": ("F16", (k // g, n)),
        },
        nearest.auto_round,
        lambda g: {
            "quant_method": "auto-round", "bits": BITS, "group_size": g, "sym": True,
            "data_type": "int", "packing_format": "auto_round:auto_gptq", "extra_config": {},
        },
        outputs=_PACKED,
    ),
    "compressed-tensors": WrittenFormat(
        lambda n, k, g: {
            "weight_packed": ("I32", (n, k // 8)), "weight_scale": ("BF16", (n, k // g)),
            "weight_shape": ("I64", (2,)),
        },
        nearest.packed,
        lambda g: _compressed(COMPRESSED_GROUPS["4"](g)),
    ),
    "nvfp4": WrittenFormat(
        lambda n, k, g: {
            "weight_packed": ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, k // 16)),
            "weight_global_scale": ("F32", (1,)),
        },
        nearest.nvfp4,
        lambda g: _compressed(compressed_group(_NVFP4, None, "nvfp4-pack-quantized")),
        groups=(16,),
    ),
    "mxfp4": WrittenFormat(
        lambda n, k, g: {
            "weight_packed": ("U8", (n, k // 2)), "weight_scale": ("U8", (n, k // 32)),
        },
        nearest.mxfp4,
        lambda g: _compressed(compressed_group(_MXFP4, None, "mxfp4-pack-quantized")),
        groups=(32,),
    ),
}  # fmt: skip
