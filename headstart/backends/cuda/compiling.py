"""Kernels compiled side by side before the first of them runs.

A start on a new machine has dozens to compile. One after the other, when each is met, they would
take longer than reading the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

from torch import nn
from triton import AsyncCompileMode
from triton.runtime._async_compile import active_mode

from headstart.backends.cuda.kernels.jit import compiling_only
from headstart.backends.cuda.round_model import RoundModel
from headstart.models.config import LayerKind

_THREADS = 8  # a compiler holds Python's lock for a part of its time only


@contextmanager
def compiled_together() -> Iterator[None]:
    """Launches inside compile and do not run: what they would write is left as it is.

    Everything is compiled when the block ends. Other operations run, on whatever numbers there
    are, so none inside may use a kernel's result as an index, and nothing may tune itself by
    timing launches. Other threads launch as always.
    """
    try:
        with ThreadPoolExecutor(_THREADS) as threads, AsyncCompileMode(threads), compiling_only():
            yield
    finally:
        active_mode.set(None)  # Triton 3.6 and 3.7 do not reset it when a kernel fails to compile


def thinned(model: RoundModel) -> RoundModel:
    """The model with one layer of each kind, which launches all kernels that the whole does."""
    first: dict[LayerKind, nn.Module] = {}
    for kind, layer in zip(model.trunk.config.layers, model.trunk.layers, strict=True):
        first.setdefault(kind, layer)
    trunk = copy(model.trunk)
    trunk._modules = {**trunk._modules, "layers": nn.ModuleList(first.values())}
    return replace(model, trunk=trunk)
