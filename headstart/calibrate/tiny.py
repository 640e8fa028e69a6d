"""Tiny checkpoints of every family, for tests and for trying things out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from headstart.calibrate.calibrated import StoredAs
from headstart.calibrate.folder import write_made
from headstart.calibrate.tensors import LIVELY, Disturbance, calibrated_tensors
from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.errors import ConfigError


def tiny_config(variant: str, **changes: Any) -> dict[str, Any]:
    """The config of a tiny checkpoint; `changes` go into its text part."""
    if variant not in TINY_CONFIGS:
        known = ", ".join(TINY_CONFIGS)
        raise ConfigError(f"no tiny checkpoint is called {variant!r}; expected one of {known}.")
    config = copy.deepcopy(TINY_CONFIGS[variant])
    config.get("text_config", config).update(changes)
    return config


def write_tiny(
    variant: str,
    out: Path,
    *,
    rate: float = 0.8,
    seed: int = 0,
    dtype: str = "BF16",
    with_head: bool = True,
    fused_experts: bool = False,
    root: str | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    disturbance: Disturbance = LIVELY,
    stored_as: StoredAs | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny checkpoint of a family; with `with_head=False` only its trunk.

    `rate` is where the head would agree if its block and the trunk's state did not disturb it.
    """
    config = tiny_config(variant, **changes)
    tensors = calibrated_tensors(
        config, rate=rate, seed=seed, dtype=dtype, with_head=with_head, root=root,
        fused_experts=fused_experts, disturbance=disturbance,
    )  # fmt: skip
    if stored_as is not None:
        config, tensors = stored_as(config, tensors)
    facts = {"variant": variant, "rate": rate, "seed": seed}
    write_made(config, tensors, out, facts=facts, shard_bytes=shard_bytes, overwrite=overwrite)
    return out
