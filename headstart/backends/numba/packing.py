"""What else of a model the compiled kernels multiply with: routers, latents, weights in one place.

Both stay in float32 whatever the weights are: near ties decide which experts run, and absorbing
needs the matrix itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from headstart.backends.numba.calls import aligned_empty
from headstart.backends.numba.linear import Packed, PackedFloat
from headstart.models.feed_forward import MoE, Router
from headstart.models.linear import Linear
from headstart.models.mla import LatentAttention

_ALIGNED = 64  # bytes


def _packed(weight: torch.Tensor) -> PackedFloat:
    source = Linear(0, 0)
    source.weight = nn.Parameter(weight.detach().float().contiguous(), requires_grad=False)
    return PackedFloat(source)


class PackedRouter(nn.Module):
    """A router whose scores the kernels compute."""

    correction: torch.Tensor | None

    def __init__(self, source: Router):
        super().__init__()
        self.config, self.product = source.config, _packed(source.weight)
        self.register_buffer("correction", source.correction)


class PackedLatent(nn.Module):
    """Of each head what brings a query into the space of latents, and a value back."""

    def __init__(self, source: LatentAttention):
        super().__init__()
        nope = source.config.nope_dim
        self.lift = nn.ModuleList(_packed(own[:nope].t()) for own in source.ups)
        self.lower = nn.ModuleList(_packed(own[nope:]) for own in source.ups)


def pack_rest(module: nn.Module) -> None:
    """Replace routers and the matrices of latents below a module."""
    for child in list(module.modules()):
        if isinstance(child, MoE) and isinstance(child.router, Router):
            child.add_module("router", PackedRouter(child.router))
        elif isinstance(child, LatentAttention):
            made = PackedLatent(child)
            del child.kv_up
            child.add_module("kv_up", made)


def lay_together(modules: Sequence[nn.Module]) -> None:
    """The weights of all layers in one array, in the order in which they are read, of which the
    parts keep views: large pages, and nothing is held twice."""
    parts = [part for module in modules for part in _parts(module)]
    if len(parts) == 1:
        return
    sizes = [-(-part.weight.nbytes // _ALIGNED) * _ALIGNED for part in parts]
    whole, start = torch.from_numpy(aligned_empty(sum(sizes))), 0
    for part, size in zip(parts, sizes, strict=True):  # one by one: each old one is let go
        old = part.weight.detach()
        view = whole[start : start + old.nbytes].view(old.dtype).view(old.shape)
        part.repack(view.copy_(old))
        start += size


def _parts(module: nn.Module) -> Iterator[Packed]:
    return (part for part in module.modules() if isinstance(part, Packed))
