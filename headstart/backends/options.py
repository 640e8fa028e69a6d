"""What decides which backend runs a model, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["as-dtype", "int8", "int4", "fp8"]

KvDtype = Literal["as-dtype", "fp8"]


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """The part of an engine's options that concerns its backend."""

    weights: Weights = "as-dtype"
    kv_dtype: KvDtype = "as-dtype"
    draft_weights: Literal["auto", "as-dtype", "int8"] = "auto"
    kernels: Literal["auto", "on", "off"] = "auto"
    exact: bool = False
    threads: int | None = None  # CPU threads of the process; None: chosen here
