"""Sizes of recurrent layers: what every kind keeps, and the gated delta net (Qwen3-Next, 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.families.dims import positive_ints

_KINDS = ("full_attention", "linear_attention")
_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """A layer that keeps, of each head, a memory from keys to values, and its last inputs."""

    k_heads: int  # of queries and keys; each serves several value heads
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int  # rows that the short convolution sees, the newest included

    @property
    def channels(self) -> int:
        """What is convolved: queries, keys and values of all heads."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def conv_values(self) -> int:
        """Numbers in one state of the convolution: the rows that it still has to see."""
        return (self.kernel - 1) * self.channels

    @property
    def memory_values(self) -> int:
        """Numbers in one recurrent state."""
        return self.v_heads * self.k_dim * self.v_dim


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrentConfig):
    """A gated delta net, or one whose channels fade each by itself (Kimi's delta attention)."""

    by_channel: bool = False
    gate: Literal["silu", "sigmoid"] = "silu"  # of what the memory gives
    least_log_decay: float | None = None  # of channels, where a sigmoid and no soft-plus gives it
    is_low_rank: bool = True  # channels' decays and gates come from a few numbers of the row


def delta_config(raw: Mapping[str, Any], layers: int, *, by_channel: bool = False) -> DeltaConfig:
    """The recurrent layers of a config, or what is wrong with it."""
    sizes = positive_ints(raw, _SIZES)
    if sizes is None or sizes[1] % sizes[0]:
        found = ", ".join(repr(raw.get(name)) for name in _SIZES)
        raise BadConfig(
            f"{', '.join(_SIZES)} are {found}; expected whole numbers above "
            "0, and as many value heads as key heads or a multiple. Take the config.json of the "
            "model's release."
        )
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        count = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise BadConfig(
            f"layer_types has {count} entries; expected one for each of {layers} layers."
        )
    unknown = sorted({str(kind) for kind in kinds or ()} - set(_KINDS))
    if unknown:
        raise UnsupportedFamily(
            f"layer_types holds {some(unknown)}; the engine computes {' and '.join(_KINDS)} for "
            f"{raw.get('model_type')}."
        )
    if raw.get("attn_output_gate") is False:
        raise UnsupportedFamily(
            "attn_output_gate is false; the engine computes gated attention for "
            f"{raw.get('model_type')}, as its published implementation does."
        )
    k_heads, v_heads, k_dim, v_dim, kernel = sizes
    gate = raw.get("output_gate_type") or "silu"
    if gate not in ("silu", "swish", "sigmoid"):
        raise UnsupportedFamily(
            f"output_gate_type is {gate!r}; the engine computes 'silu' and 'sigmoid'."
        )
    least = raw.get("linear_lower_bound") if by_channel else None
    if least is not None and least >= 0:
        raise BadConfig(
            f"the lower bound of decays (gate_lower_bound, kda_lower_bound, linear_lower_bound) is "
            f"{least!r}; expected a number below 0, as memories would never fade. Take the "
            "config.json of the model's release."
        )
    return DeltaConfig(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        kernel=kernel,
        by_channel=by_channel,
        gate="sigmoid" if gate == "sigmoid" else "silu",
        least_log_decay=None if least is None else float(least),
        is_low_rank=not raw.get("no_kda_lora"),
    )
