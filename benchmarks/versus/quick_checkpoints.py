"""Calibrated checkpoints in any format, written as fast as a disk takes them.

Projections of one name and shape hold the same values in all layers and experts: they are made and
rounded once. What engines read, and how long that takes, does not depend on it; what decides about
tokens is as `headstart calibrate` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headstart.calibrate.calibrated import write_calibrated
from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.heads.quantized_copy import PROJECTIONS, quantized_copy

Key = tuple[str, str, str, tuple[int, ...]]  # module, parameter, dtype, shape


def write_quickly(
    shape: str,
    weights: str | None,
    out: Path,
    *,
    rate: float,
    active: int,
    keeps: Callable[[str], bool] = lambda name: True,
) -> None:
    """Write `shape` with its projections in the format `weights`; None: as they are.

    `keeps` says by name which tensors are written.
    """
    stored_as = partial(_stored, weights=weights, keeps=keeps)
    write_calibrated(shape, rate, out, active=active, stored_as=stored_as, overwrite=True)


def _stored(
    config: dict[str, Any],
    tensors: Mapping[str, TensorSource],
    *,
    weights: str | None,
    keeps: Callable[[str], bool],
) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    tensors = {name: source for name, source in tensors.items() if keeps(name)}
    if weights is not None:
        config, tensors = quantized_copy(config, tensors, weights)
    first: dict[Key, TensorSource] = {}
    return config, {name: _repeated(name, source, first) for name, source in tensors.items()}


def _repeated(name: str, source: TensorSource, first: dict[Key, TensorSource]) -> TensorSource:
    """The first tensor of this kind, whose bytes are kept once they were made."""
    module, _, parameter = name.rpartition(".")
    own = module.rpartition(".")[2]
    if own not in PROJECTIONS:
        return source
    key = own, parameter, source.dtype, source.shape
    if key not in first:
        first[key] = TensorSource(source.dtype, source.shape, _kept(source), is_copy=False)
    return first[key]


def _kept(source: TensorSource) -> Callable[[], Iterator[bytes]]:
    kept: list[bytes] = []

    def pieces() -> Iterator[bytes]:
        if not kept:
            for piece in source.pieces():
                assert not isinstance(piece, FileSlice), "these are computed, not copied"
                kept.append(bytes(piece))
        yield from kept

    return pieces
