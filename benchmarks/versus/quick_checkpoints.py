"""Calibrated checkpoints in any format, written as fast as a disk takes them.

PYTHONPATH=. python3 benchmarks/versus/quick_checkpoints.py SHAPE FOLDER [--weights fp8-block]

Projections of one name and shape hold the same values in all layers and experts: they are made and
rounded once. What engines read, and how long that takes, does not depend on it; what decides about
tokens is as `headstart calibrate` makes it. That its decisions are far enough apart is not looked
at here: of 250,000 tokens that takes as long as the rest, and every answer is checked afterwards.
"""

from __future__ import annotations

import argparse
import sys
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
    active: int | None,
    keeps: Callable[[str], bool] = lambda name: True,
) -> dict[str, Any]:
    """Write `shape` with its projections in the format `weights`; None: as they are.

    `active`: tokens in use, None: all. `keeps` says by name which tensors are written.
    """
    stored_as = partial(_stored, weights=weights, keeps=keeps)
    return write_calibrated(
        shape, rate, out, active=active, stored_as=stored_as, overwrite=True, margin_tokens=0
    )


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
    if own not in PROJECTIONS and parameter not in PROJECTIONS:  # that of a stack of experts
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", help="a format; default: the type of the shape")
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--active", type=int, help="tokens in use; default: all")
    given = parser.parse_args()
    made = write_quickly(
        given.shape, given.weights, given.out, rate=given.rate, active=given.active
    )
    print(f"{given.out}: {made['bytes'] / 1e9:.1f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
