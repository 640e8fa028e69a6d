"""Latent attention's up-projection in two: keys, transposed, and values, head by head.

llama.cpp and MLX store it so, because they multiply either with something else. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.gguf.encoding import PLAIN
from headstart.checkpoint.gguf.values import cast, interleaved, picked, transposed
from headstart.checkpoint.source import TensorSource, reshaped
from headstart.errors import ConfigError, ShapeMismatch
from headstart.families.dims import dims


def split_kv_b(
    name: str, source: TensorSource, fields: Mapping[str, Any]
) -> tuple[TensorSource, TensorSource]:
    """[heads, rank, keys] and [heads, values, rank] of a published kv_b_proj."""
    known = dims(fields)
    heads, nope, value = (known.get(key, 0) for key in ("heads", "nope_dim", "v_dim"))
    period = nope + value
    fits = len(source.shape) == 2 and source.shape[0] == heads * period and 0 not in source.shape
    if not nope or not value or not fits:
        raise ConfigError(
            f"{name} has shape {list(source.shape)}; the config's num_attention_heads, "
            f"qk_nope_head_dim and v_head_dim ask for {heads * period} rows. Give the head with "
            "the config of its model."
        )
    return transposed(picked(source, period, 0, nope)), picked(source, period, nope, period)


def joined_kv_b(key: TensorSource, value: TensorSource) -> TensorSource:
    """kv_b_proj as it is published, of its two parts."""
    shapes = len(key.shape), len(value.shape)
    is_empty = 0 in (*key.shape, *value.shape)
    if (
        shapes != (3, 3)
        or is_empty
        or key.shape[0] != value.shape[0]
        or key.shape[1] != value.shape[2]
    ):
        raise ShapeMismatch(
            f"the two parts of kv_b_proj are {list(key.shape)} and {list(value.shape)}; expected "
            "[heads, rank, keys] and [heads, values, rank], none of them 0. The file is damaged: "
            "download or export it again."
        )
    if key.dtype != value.dtype or key.dtype not in PLAIN:
        key, value = cast(key, "F32"), cast(value, "F32")
    heads, rank, nope = key.shape
    width = value.shape[1]
    parts = [
        reshaped(transposed(key), (heads * nope, rank)),
        reshaped(value, (heads * width, rank)),
    ]
    return interleaved(parts, [nope, width])
