"""How matrices are held: as they are, in 8 bits, or as the compiled kernels of a CPU read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from headstart.backends.cuda.fp8 import Fp8Linear
from headstart.backends.numba.compiler import why_missing
from headstart.models.linear import Int8Linear, Linear
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk

Weights = Literal["as-dtype", "int8", "fp8"]

FORMS: dict[str, Callable[[Linear], nn.Module]] = {"int8": Int8Linear, "fp8": Fp8Linear}


def fastest_form(weights: Weights) -> Callable[[Linear], nn.Module]:
    """How matrices are held: int8 by the compiled kernels, where this machine has numba."""
    if weights != "int8":
        return FORMS[weights]
    if why_missing() is not None:
        return FORMS[weights]
    from headstart.backends.numba.linear import PackedLinear

    return PackedLinear


def why_not_compiled(trunk: Trunk, head: MTPHead | None, dtype: torch.dtype) -> str | None:
    """What keeps a model from running through the compiled kernels of a CPU, or None."""
    lm_head: nn.Module = trunk.lm_head
    if type(lm_head) is Linear:  # asked before numba is loaded, which nobody may need
        return "weights are not packed"
    if (missing := why_missing()) is not None:
        return missing
    if type(lm_head) is Int8Linear:
        return "kernels are off"
    return _why_not_whole(trunk, head, dtype)


def can_compile(trunk: Trunk, head: MTPHead | None, dtype: torch.dtype) -> bool:
    """Whether whole passes of a model with float32 weights could be compiled on this machine."""
    on_cpu = trunk.embed.device.type == "cpu"
    return on_cpu and why_missing() is None and _why_not_whole(trunk, head, dtype) is None


def _why_not_whole(trunk: Trunk, head: MTPHead | None, dtype: torch.dtype) -> str | None:
    """What of a model the compiled kernels cannot do, or None."""
    if dtype != torch.float32:
        return f"numbers are {dtype}"
    from headstart.backends.numba.forward import why_unsupported

    reason = why_unsupported(trunk.config, trunk.config.layers)
    if reason is None and head is not None:
        reason = why_unsupported(head.config, [head.config.head_layer])
    return reason
