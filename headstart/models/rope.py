"""Rotary positions: the kinds that published families use.

Frequencies depend on the config alone, never on the length of a text: a kind whose frequencies
change with the length ("dynamic") would make text depend on how a prompt was cut into chunks,
and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from headstart.errors import BadConfig, UnsupportedFamily

# kind -> what a config must give for it; the rest has defaults that implementations share
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    ),
    "yarn": ("factor",),
}  # fmt: skip
KINDS = tuple(_REQUIRED)
_ROWS = 1 << 16  # of a table, computed at once
_FEWEST = 1024  # positions of a table that layers share


@dataclass(frozen=True)
class RopeConfig:
    kind: str
    theta: float
    dim: int  # rotated part of a head
    factor: float = 1.0
    original_positions: int = 0
    low_factor: float = 1.0
    high_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # yarn scales cos and sin
    truncate: bool = True  # yarn's range of dimensions is widened to whole numbers
    is_interleaved: bool = False  # pairs are neighbours, not halves apart


NO_ROTATION = RopeConfig("none", 1.0, 0)


def rope_config(
    raw: Mapping[str, Any],
    head_dim: int,
    *,
    may_be_partial: bool = False,
    is_interleaved: bool = False,
) -> RopeConfig:
    """From `rope_parameters` (newer configs) or `rope_theta` and `rope_scaling`."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1)
    if kind not in KINDS:
        raise UnsupportedFamily(
            f"rope type {kind!r} is not supported; expected one of {', '.join(KINDS)}. Frequencies "
            "that change with the length of the text would make it depend on chunking."
        )
    if partial != 1 and not may_be_partial:
        raise UnsupportedFamily(
            f"partial_rotary_factor is {partial}; {raw.get('model_type')} models rotate all."
        )
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise BadConfig(
            f"partial_rotary_factor is {partial} and head_dim {head_dim}: {dim} dimensions would "
            "be rotated; expected an even number of them. Take the config.json of the release."
        )
    for name in _REQUIRED[kind]:
        if not isinstance(scaling.get(name), int | float):
            raise BadConfig(
                f"rope type {kind!r} has {name} {scaling.get(name)!r}; expected a number. Take the "
                "config.json of the model's release."
            )
    factor = float(scaling.get("factor") or 1.0)
    original = int(
        scaling.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
        or raw.get("max_position_embeddings")
        or 0
    )
    return RopeConfig(
        kind,
        theta,
        dim,
        factor,
        original,
        float(scaling.get("low_freq_factor") or 1.0),
        float(scaling.get("high_freq_factor") or 4.0),
        float(scaling.get("beta_fast") or 32.0),
        float(scaling.get("beta_slow") or 1.0),
        _attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        bool(scaling.get("truncate", True)),
        is_interleaved,
    )


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature (arXiv 2309.00071, equation 22), with DeepSeek's two mscale fields."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def frequencies(config: RopeConfig) -> torch.Tensor:
    """Inverse frequencies [dim / 2] in fp32 arithmetic, as the published models computed them."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64, device="cpu").float() / config.dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, plain)
    return plain


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / plain
    low = config.original_positions / config.low_factor
    high = config.original_positions / config.high_factor
    share = (config.original_positions / wavelength - config.low_factor) / (
        config.high_factor - config.low_factor
    )
    between = (1 - share) * plain / config.factor + share * plain
    result = torch.where(wavelength > low, plain / config.factor, plain)
    is_between = (wavelength >= high) & (wavelength <= low)
    return torch.where(is_between, between, result)


def _yarn(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Interpolated by the number of rotations a dimension makes over the original context."""

    def dimension(rotations: float) -> float:
        turns = config.original_positions / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    steps = torch.arange(config.dim // 2, dtype=torch.float32, device="cpu") - low
    ramp = (steps / max(high - low, 0.001)).clamp(0, 1)
    keep = 1 - ramp
    return plain / config.factor * (1 - keep) + plain * keep


class Rotation(NamedTuple):
    """cos and signed sin [T, 1, dim] of some rows, and which dimensions form a pair."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool


def in_halves(rotation: Rotation) -> Rotation:
    """The same angles for pairs that lie half the rotated size apart."""
    if not rotation.is_interleaved:
        return rotation
    cos, sin = (torch.cat([part[..., ::2], part[..., 1::2]], -1) for part in rotation[:2])
    return Rotation(cos, sin, False)


def table_bytes(config: RopeConfig, dtype: torch.dtype) -> int:
    """Memory that a RotaryTable takes for each position."""
    return 2 * config.dim * dtype.itemsize


class RotaryTable(torch.nn.Module):
    """cos and sin for every position up to a length, computed once."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: RopeConfig, positions: int, dtype: torch.dtype):
        super().__init__()
        # On the CPU even inside a meta module: arange there would import torch's compiler, which
        # takes longer than everything else at the start of a small model.
        cos, sin = (torch.empty(positions, config.dim, dtype=dtype, device="cpu") for _ in "ab")
        for start in range(0, positions, _ROWS):  # intermediate values take more than the tables
            stop = min(start + _ROWS, positions)
            cos[start:stop], sin[start:stop] = _cos_and_sin(config, start, stop, dtype)
        self.is_interleaved = config.is_interleaved
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def num_positions(self) -> int:
        return self.cos.shape[0]

    def at(self, positions: torch.Tensor) -> Rotation:
        """What turns rows at these positions [T]."""
        cos, sin = (part[positions].unsqueeze(1) for part in (self.cos, self.sin))
        return Rotation(cos, sin, self.is_interleaved)


def shared_table(
    config: RopeConfig, positions: int, dtype: torch.dtype, device: torch.device
) -> RotaryTable:
    """One with at least so many positions, for layers that rotate more than their rows."""
    size = max(_FEWEST, 1 << (positions - 1).bit_length()) if positions > 0 else _FEWEST
    return _shared_table(config, size, dtype, device)


@lru_cache(4)
@torch.inference_mode(False)
def _shared_table(
    config: RopeConfig, positions: int, dtype: torch.dtype, device: torch.device
) -> RotaryTable:
    return RotaryTable(config, positions, dtype).to(device)


def _cos_and_sin(
    config: RopeConfig, start: int, stop: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of positions [start, stop), in fp32 or better."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    at = torch.arange(start, stop, dtype=precise, device="cpu")
    angles = torch.outer(at, frequencies(config).to(precise))
    signs = torch.tensor([-1.0, 1.0], dtype=precise, device="cpu")
    # The first of each pair has its sin negated here once, so that applying needs no negation.
    if config.is_interleaved:
        both, sign = angles.repeat_interleave(2, dim=-1), signs.repeat(config.dim // 2)
    else:
        both, sign = angles.repeat(1, 2), signs.repeat_interleave(config.dim // 2)
    scale = config.attention_factor
    return both.cos() * scale, both.sin() * scale * sign


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    """Rotate [T, heads, head_dim] by position; `sin` carries the sign of the first of each pair.

    Where fewer dimensions are rotated than a head has, the others pass as they are.
    """
    dim = cos.shape[-1]
    if dim == 0:
        return x
    if dim < x.shape[-1]:
        turned = rotate(x[..., :dim], cos, sin, is_interleaved)
        return torch.cat([turned, x[..., dim:]], dim=-1)
    if is_interleaved:
        partner = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partner = torch.roll(x, dim // 2, dims=-1)
    return torch.addcmul(x * cos, partner, sin)
