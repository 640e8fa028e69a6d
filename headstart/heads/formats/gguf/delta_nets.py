"""Layers that keep a state, from llama.cpp's order of values back to the published one.

For Qwen3.5 it stores the heads of values by turns of the key heads (all first ones, then all
second ones); for Qwen3-Next it takes the rows of each key head apart. What remains is renamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from headstart.checkpoint.dtypes import GGUF_TYPES
from headstart.checkpoint.gguf.values import cast, floats_of, picked, regrouped
from headstart.checkpoint.source import TensorSource, concatenated, reshaped, rows
from headstart.checkpoint.values import as_bytes
from headstart.errors import ShapeMismatch

Tensors = Mapping[str, TensorSource]
Changed = tuple[dict[str, TensorSource], set[str]]
_AT = "linear_attn."
_RENAMED = {"ssm_dt.bias": "dt_bias", "attn_gate.weight": "in_proj_z.weight"}


def tiled_values(own: Tensors, config: Mapping[str, Any]) -> Changed:
    """Qwen3.5, dense and with experts."""
    if "ssm_a" not in own:
        return {}, set()
    keys, heads, width = _sizes(config)
    each = {
        "ssm_a": ("A_log", 1), "ssm_dt.bias": ("dt_bias", 1),
        "ssm_beta.weight": ("in_proj_b.weight", 1), "ssm_alpha.weight": ("in_proj_a.weight", 1),
        "attn_gate.weight": ("in_proj_z.weight", width),
        "attn_qkv.weight": ("in_proj_qkv.weight", width),
        "ssm_conv1d.weight": ("conv1d.weight", width),
    }  # fmt: skip
    result: dict[str, TensorSource] = {}
    for theirs, (name, height) in each.items():
        if theirs in own:
            source = _checked(theirs, own[theirs], heads * height)
            result[_AT + name] = _grouped(source, keys, heads // keys, height)
    if "ssm_out.weight" in own:
        out = own["ssm_out.weight"]
        result[f"{_AT}out_proj.weight"] = _grouped_columns(out, keys, heads // keys, width)
    return _finished(result), {*each, "ssm_out.weight"} & set(own)


def joined_inputs(own: Tensors, config: Mapping[str, Any]) -> Changed:
    """Qwen3-Next, under the names of Qwen3.5: rows are in that order already, but for b and a."""
    if "ssm_a" not in own:
        return {}, set()
    keys, heads, _ = _sizes(config)
    names = {**_RENAMED, "ssm_a": "A_log", "attn_qkv.weight": "in_proj_qkv.weight"}
    names["ssm_conv1d.weight"] = "conv1d.weight"
    result = {_AT + ours: own[theirs] for theirs, ours in names.items() if theirs in own}
    both = own.get("ssm_ba.weight")
    if both is not None:
        group = heads // keys
        both = _checked("ssm_ba.weight", both, 2 * heads)
        for place, name in enumerate("ba"):
            part = picked(both, 2 * group, place * group, (place + 1) * group)
            result[f"{_AT}in_proj_{name}.weight"] = reshaped(part, (heads, both.shape[1]))
    return _finished(result), {*names, "ssm_ba.weight"} & set(own)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Key heads, value heads and the width of the latter."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
    keys, heads, width = (int(config[name]) for name in names)
    if not keys or heads % keys or not width:
        raise ShapeMismatch(
            f"the file has {heads} value heads of width {width} for {keys} key heads; expected a "
            "whole number for each. Convert the model again."
        )
    return keys, heads, width


def _checked(name: str, source: TensorSource, least: int) -> TensorSource:
    if not source.shape or source.shape[0] < least:
        raise ShapeMismatch(
            f"{name} has shape {list(source.shape)}; the keys of the file ask for at least {least} "
            "rows. Convert the model again."
        )
    return source


def _finished(found: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """With what is stored as another number, or in another shape."""
    for name, source in found.items():
        if name == f"{_AT}A_log":
            found[name] = _logarithms(source)
        elif name == f"{_AT}conv1d.weight" and len(source.shape) == 2:
            channels, taps = source.shape
            found[name] = reshaped(source, (channels, 1, taps))
    return found


def _grouped(source: TensorSource, keys: int, group: int, height: int) -> TensorSource:
    """The last rows, `height` for each value head, by key head again; those before them stay."""
    count = keys * group * height
    first = source.shape[0] - count
    width = prod(source.shape[1:])
    last = reshaped(rows(source, first, source.shape[0]), (keys * group, height * width))
    return concatenated([rows(source, 0, first), regrouped(last, group, keys)], source.shape)


def _grouped_columns(source: TensorSource, keys: int, group: int, width: int) -> TensorSource:
    """The same for columns; a type whose blocks hold several heads is dequantised for it."""
    if len(source.shape) != 2 or source.shape[1] != keys * group * width:
        raise ShapeMismatch(
            f"ssm_out.weight has shape {list(source.shape)}; the keys of the file ask for "
            f"{keys * group * width} columns. Convert the model again."
        )
    if width % GGUF_TYPES[source.dtype][1]:
        source = cast(source, "F32")
    heads = reshaped(source, (source.shape[0] * keys * group, width))
    return reshaped(regrouped(heads, group, keys), source.shape)


def _logarithms(source: TensorSource) -> TensorSource:
    """log(-x) of what was stored as -exp(a): the number whose exponential is the stored one."""

    def pieces() -> Iterator[memoryview]:
        import torch

        wanted = -torch.from_numpy(floats_of(source))
        near = wanted.log()
        result = near.clone()
        up, down = (torch.nextafter(near, torch.full_like(near, end)) for end in (9e9, -9e9))
        # Releases have BF16, so that is tried last and wins.
        for other in (down, up, near, near.bfloat16().float()):
            result = torch.where(other.exp() == wanted, other, result)
        yield as_bytes(result)

    return TensorSource("F32", source.shape, pieces, is_copy=False)
