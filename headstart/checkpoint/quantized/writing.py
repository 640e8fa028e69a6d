"""Matrices rounded to nearest and laid down as published formats store them.

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
from headstart.checkpoint.quantized.packing import WORD, awq_pack, gptq_stored_zeros, pack
from headstart.checkpoint.quantized.weights import FP8_BLOCK, fp8_rows
from headstart.checkpoint.reader import torch_dtype
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load

if TYPE_CHECKING:
    import torch

    Make = Callable[[torch.Tensor, int], dict[str, torch.Tensor]]
Layout = dict[str, tuple[str, tuple[int, ...]]]  # suffix -> dtype and shape
_BITS, _LARGEST_CODE, _MIDDLE = 4, 15, 8
_PACKED = WORD // _BITS
_LEAST_SCALE = 2.0**-14  # the smallest that FP16 has with all its bits


@dataclass(frozen=True)
class WrittenFormat:
    """How one format stores a matrix, and what its config says."""

    layout: Callable[[int, int, int], Layout]  # of a matrix [N, K] in groups of g
    make: Make  # values fp32 [N, K] and g -> tensors by suffix
    config: Callable[[int], dict[str, Any]]  # quantization_config, without its list of modules
    has_groups: bool = True  # whether K has to be a whole number of groups
    outputs: int = 1  # N has to be a multiple of: outputs that share a word


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


def _fp8_block(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    import torch
    from torch.nn.functional import pad

    rows, columns = values.shape
    largest = torch.finfo(torch.float8_e4m3fn).max
    padded = pad(values, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / largest).clamp(min=1e-12)
    scaled = (blocks / scales[:, None, :, None]).clamp(-largest, largest).view_as(padded)
    weight = scaled[:rows, :columns].to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": scales}


def _fp8_row(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    made = fp8_rows(values)
    return {"weight": made.weight, "weight_scale": made.scales.unsqueeze(1)}


def _awq(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    import torch

    parts = values.view(len(values), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / _LARGEST_CODE).clamp(min=_LEAST_SCALE).half()
    zeros = (-low / scales.float()).round().clamp(0, _LARGEST_CODE)
    codes = (parts / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    codes = codes.clamp(0, _LARGEST_CODE).to(torch.uint8).view_as(values)
    return {
        "qweight": awq_pack(codes.t().contiguous()),
        "qzeros": awq_pack(zeros.to(torch.uint8).t().contiguous()),
        "scales": scales.t().contiguous(),
    }


def _symmetric(
    values: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsigned codes [N, K] around 8, and scales [N, K/g]."""
    import torch

    parts = values.view(len(values), -1, group)
    scales = (parts.abs().amax(-1) / (_MIDDLE - 0.5)).clamp(min=_LEAST_SCALE).to(dtype)
    codes = (parts / scales.float().unsqueeze(-1)).round() + _MIDDLE
    return codes.clamp(0, _LARGEST_CODE).to(torch.uint8).view_as(values), scales


def _gptq(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    import torch

    codes, scales = _symmetric(values, group, torch.float16)
    zeros = torch.full((scales.shape[1], len(values)), _MIDDLE, dtype=torch.uint8)
    return {
        "qweight": pack(codes, _BITS).t().contiguous(),
        "qzeros": gptq_stored_zeros(pack(zeros, _BITS), _BITS),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(values.shape[1]) // group).to(torch.int32),
    }


def _packed(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    import torch

    codes, scales = _symmetric(values, group, torch.bfloat16)
    shape = torch.tensor(values.shape, dtype=torch.int64)
    return {"weight_packed": pack(codes, _BITS), "weight_scale": scales, "weight_shape": shape}


def _compressed(weights: Mapping[str, Any], activations: Any, form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": dict(weights), "input_activations": activations,
                "output_activations": None,
            }
        },
    }  # fmt: skip


_FP8_WEIGHTS = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False,
    "group_size": None, "observer": "minmax",
}  # fmt: skip
_FP8_ROWS = {**_FP8_WEIGHTS, "strategy": "token", "dynamic": True, "observer": None}

FORMATS: dict[str, WrittenFormat] = {
    "fp8-block": WrittenFormat(
        lambda n, k, g: {
            "weight": ("F8_E4M3", (n, k)),
            "weight_scale_inv": ("F32", (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))),
        },
        _fp8_block,
        lambda g: {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
        has_groups=False,
    ),
    "fp8-row": WrittenFormat(
        lambda n, k, g: {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("F32", (n, 1))},
        _fp8_row,
        lambda g: _compressed(_FP8_WEIGHTS, _FP8_ROWS, "float-quantized"),
        has_groups=False,
    ),
    "awq": WrittenFormat(
        lambda n, k, g: {
            "qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (k // g, n // 8)),
            "scales": ("F16", (k // g, n)),
        },
        _awq,
        lambda g: {
            "quant_method": "awq", "bits": _BITS, "group_size": g, "zero_point": True,
            "version": "gemm",
        },
        outputs=_PACKED,
    ),
    "gptq": WrittenFormat(
        lambda n, k, g: {
            "qweight": ("I32", (k // 8, n)), "qzeros": ("I32", (k // g, n // 8)),
            "scales": ("F16", (k // g, n)), "g_idx": ("I32", (k,)),
        },
        _gptq,
        lambda g: {
            "quant_method": "gptq", "bits": _BITS, "group_size": g, "sym": True,
            "desc_act": False, "lm_head": False, "checkpoint_format": "gptq",
        },
        outputs=_PACKED,
    ),
    "compressed-tensors": WrittenFormat(
        lambda n, k, g: {
            "weight_packed": ("I32", (n, k // 8)), "weight_scale": ("BF16", (n, k // g)),
            "weight_shape": ("I64", (2,)),
        },
        _packed,
        lambda g: _compressed(
            {
                "num_bits": _BITS, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": g, "dynamic": False, "actorder": None, "observer": "minmax",
            },
            None,
            "pack-quantized",
        ),
    ),
}  # fmt: skip
