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
from headstart.models.attention import LayerCache
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
    config, caches = model.trunk.config, iter(model.caches)
    first: dict[tuple[LayerKind, int | None], tuple[nn.Module, LayerCache | None]] = {}
    whole = zip(config.layers, config.windows, model.trunk.layers, strict=True)
    for kind, window, layer in whole:
        first.setdefault((kind, window), (layer, next(caches) if kind.attends else None))
    trunk = copy(model.trunk)
    kinds, windows = zip(*first, strict=True)
    trunk.config = replace(config, num_layers=len(first), layers=kinds, windows=windows)
    layers = nn.ModuleList(layer for layer, _ in first.values())
    trunk._modules = {**trunk._modules, "layers": layers}
    kept = [cache for _, cache in first.values() if cache is not None]
    return replace(model, trunk=trunk, caches=kept)
