"""Attention of one prompt by FlashAttention: version 2 comes with PyTorch, version 3 may be there.

Both take any length and align the causal mask with the last key, so nothing is filled up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.backends.cuda.transfer import on_device

# What the operator of version 3 wants besides q, k, v and their edges; everything else is None.
_PLAIN: dict[str, Any] = {
    "is_causal": True, "window_size_left": -1, "window_size_right": -1, "attention_chunk": 0,
    "softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 1, "sm_margin": 0,
    "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip


def by_flash2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, H, D], k and v [L, G, D] -> [n, H, D]; the last row sees all L."""
    rows, length = q.shape[0], k.shape[0]
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, _edges(rows, q.device), _edges(length, q.device), rows, length, 0.0, True, False
    )[0]
    return result


def by_flash3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by version 3."""
    operator = _operator()
    if operator is None:
        raise RuntimeError("FlashAttention 3 is not installed")
    rows, length = q.shape[0], k.shape[0]
    given = {
        **_PLAIN, "q": q, "k": k, "v": v, "cu_seqlens_q": _edges(rows, q.device),
        "cu_seqlens_k": _edges(length, q.device), "max_seqlen_q": rows, "max_seqlen_k": length,
        "softmax_scale": q.shape[-1] ** -0.5,
    }  # fmt: skip
    # Builds differ in what they take; all that they share goes by name.
    result: Tensor = operator.call(*(given.get(name) for name in operator.names))[0]
    return result


class _Operator(NamedTuple):
    call: Callable[..., Any]
    names: tuple[str, ...]  # of its arguments


@cache
def _operator() -> _Operator | None:
    """Of the package flash-attn-3, or of an installed vLLM, which carries a build of it."""
    loads: dict[str, Callable[[], Any]] = {
        "flash_attn_3": lambda: import_module("flash_attn_interface"),
        "_vllm_fa3_C": _load_from_vllm,
    }
    for name, load in loads.items():
        try:
            load()
            found = getattr(torch.ops, name).fwd.default
        except (ImportError, OSError, AttributeError):  # absent, or made for another PyTorch
            continue
        return _Operator(found, tuple(argument.name for argument in found._schema.arguments))
    return None


def _load_from_vllm() -> None:
    """The library alone: importing all of vLLM takes seconds."""
    spec = find_spec("vllm")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    files = [file for place in places for file in Path(place).glob("vllm_flash_attn/_vllm_fa3_C*")]
    if not files:
        raise ImportError("no vLLM with FlashAttention 3")
    torch.ops.load_library(str(files[0]))  # type: ignore[no-untyped-call]


@lru_cache(64)
@torch.inference_mode(False)
def _edges(length: int, device: torch.device) -> Tensor:
    """Where one text begins and ends; made once, not in every layer."""
    return on_device([0, length], device, torch.int32)
