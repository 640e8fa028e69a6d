"""Quantised matrices of a model in the forms that kernels compute with.

`KernelLinear` is a weight format with kernels of its own: `KernelFp8` for 8-bit floats,
`KernelGroups` for integers in groups.
"""

from __future__ import annotations

from torch import Tensor, nn

from headstart.backends.cuda.fp8_linear import KernelFp8
from headstart.backends.cuda.group_linear import KernelGroups
from headstart.backends.cuda.kernels.eight_bits import Fp8Rows
from headstart.backends.cuda.kernels.rows import add_norm, add_norm_fp8
from headstart.models.linear import Linear
from headstart.models.quantized import Fp8Linear, GroupLinear


def add_norm_for(
    layer: Linear | None, stream: Tensor, partial: Tensor, weight: Tensor, eps: float
) -> Tensor | Fp8Rows:
    """`add_norm`, rounded by the same kernel where only `layer` reads it and takes it so."""
    if isinstance(layer, KernelFp8):
        return add_norm_fp8(stream, partial, weight, eps, layer.group)
    return add_norm(stream, partial, weight, eps)


def hold_for_kernels(module: nn.Module) -> list[str]:
    """Give every quantised matrix below `module` the form of its kernels; notes about others."""
    small, kinds = 0, (Fp8Linear, GroupLinear)
    # By name, so that each original is freed when it is replaced: integers are packed anew.
    for path in [name for name, layer in module.named_modules() if isinstance(layer, kinds)]:
        layer = module.get_submodule(path)
        made: Linear | None = None
        if isinstance(layer, Fp8Linear) and not isinstance(layer, KernelFp8):
            bias = None if layer.bias is None else layer.bias.detach()
            made = KernelFp8(layer.quantized, bias, layer.dtype)
            made.prepare()
        elif isinstance(layer, GroupLinear):
            made = KernelGroups.of(layer)
            if made is None:
                made, small = _plain(layer), small + 1
        if made is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, made)
    if not small:
        return []
    return [f"{small} matrices are dequantised: kernels want groups of a multiple of 32 inputs"]


def _plain(layer: GroupLinear) -> Linear:
    result = Linear(0, 0)
    result.weight = nn.Parameter(layer.matrix, requires_grad=False)
    result.bias = layer.bias
    return result


def round_to_fp8(module: nn.Module) -> None:
    """Round every plain matrix below `module` but LM heads, with one scale per output row.

    Rounding an LM head changes the text as much as rounding all layers does. The gate of shared
    experts is one row, which the choice of experts reads as it is.
    """
    for name, child in module.named_children():
        if type(child) is not Linear:
            round_to_fp8(child)
        elif name not in ("lm_head", "shared_gate"):
            setattr(module, name, KernelFp8.of(child))
