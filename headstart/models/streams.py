"""Several residual streams beside each other: what a layer reads of them, and writes to them.

Rows carry all streams, one after another: [T, S * hidden]. A `Connection` weighs the streams into
the one row that a mixer or a feed-forward part takes, and gives what that makes back to each of
them (hyper-connections, arXiv 2409.19606). `Joined` takes the place of a trunk's final norm: it
makes one row of the streams, and norms it. All weights follow from the row itself, in fp32 at
least, so that no row depends on those beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from headstart.errors import BadConfig
from headstart.families.dims import dims, number
from headstart.models.linear import PRODUCTS
from headstart.models.norm import Norm

StreamKind = Literal["independent", "balanced", "gated"]
Half = Callable[[Tensor], Tensor]  # what runs between reading and writing: [T, hidden] each


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    count: int
    # `independent`: each stream goes on as it is; `balanced`: they are mixed, by shares whose rows
    # and columns add up to 1 (arXiv 2512.24880); `gated`: models/gated_streams.py
    kind: StreamKind
    joined: Literal["weighed", "mean"]
    norm_eps: float
    eps: float  # added to shares
    magnitude: float  # of what is written, at most
    steps: int  # that balance shares
    rank: int  # of gates


def stream_config(
    raw: Mapping[str, Any], kind: StreamKind, parameters: Collection[str]
) -> StreamConfig:
    """The streams of a config; `parameters` are ours outside of the layers."""
    count = dims(raw).get("hc")
    steps = int(raw.get("hc_sinkhorn_iters") or 20)
    if count is None or steps < 1:
        raise BadConfig(
            "the config gives no number of residual streams (hc_mult, hc_count); expected a whole "
            "number above 0. Take the config.json of the model's release."
        )
    rank = dims(raw).get("hc_rank", 0)
    if kind == "gated" and not rank:
        raise BadConfig(
            "the config gives no rank of the streams' gates (hc_lowrank); expected a whole number "
            "above 0. Take the config.json of the model's release."
        )
    return StreamConfig(
        count=count,
        kind=kind,
        joined="weighed" if "final_norm.join.weight" in parameters else "mean",
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        eps=number(raw, "hc_eps", 1e-6),
        magnitude=number(raw, "hc_magnitude", 2.0),
        steps=steps,
        rank=rank,
    )


class Shares(nn.Module):
    """Numbers that follow from a row's streams: a product with all of them, scaled and shifted."""

    def __init__(self, config: StreamConfig, hidden: int, sizes: list[int]):
        super().__init__()
        self.eps, self.sizes = config.norm_eps, sizes
        self.weight = nn.Parameter(
            torch.empty(sum(sizes), config.count * hidden), requires_grad=False
        )
        self.base = nn.Parameter(torch.empty(sum(sizes)), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(len(sizes)), requires_grad=False)
        self.one_by_one = False  # set by backends/torch/exact.py

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """They stay in fp32 when the model does not, as published."""
        nn.Module._apply(self, fn, recurse)
        for parameter in (self.weight, self.base, self.scale):
            parameter.data = _wide(parameter.data)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, S * hidden], wide -> [T, size] for every size."""
        product = PRODUCTS["single"] if self.one_by_one else linear
        found = product(rms_norm(x, (x.shape[-1],), eps=self.eps), _wide(self.weight))
        parts = zip(
            torch.split(found, self.sizes, dim=-1),
            torch.split(_wide(self.base), self.sizes),
            _wide(self.scale),
            strict=True,
        )
        return tuple(part * scale + base for part, base, scale in parts)


class Connection(nn.Module):
    """How one half of a layer reads and writes the streams."""

    def __init__(self, config: StreamConfig, hidden: int):
        super().__init__()
        self.config = config
        count = config.count
        sizes = [count, count] + ([count * count] if config.kind == "balanced" else [])
        self.shares = Shares(config, hidden, sizes)

    def forward(self, x: Tensor, run: Half) -> Tensor:
        """x [T, S * hidden] -> the same, with what `run` makes of it."""
        config, wide = self.config, _wide(x)
        streams = wide.view(len(x), config.count, -1)
        reading, writing, *rest = self.shares(wide)
        made = run(_weighed(streams, reading.sigmoid() + config.eps).to(x.dtype))
        given = config.magnitude * writing.sigmoid()
        if rest:
            kept = _mixed(streams, _balanced(rest[0].view(-1, config.count, config.count), config))
        else:
            kept, given = streams, given + config.eps
        result = given.unsqueeze(-1) * _wide(made).unsqueeze(1) + kept
        assert isinstance(result, Tensor)
        return result.flatten(1).to(x.dtype)


class Joined(nn.Module):
    """The streams as one row, after the final norm: their mean, or weighed by shares."""

    def __init__(self, config: StreamConfig, hidden: int, norm: Norm):
        super().__init__()
        self.config, self.norm = config, norm
        weighed = config.joined == "weighed"
        self.join = Shares(config, hidden, [config.count]) if weighed else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, S * hidden] -> [T, hidden]."""
        result = self.norm(self.joined(x))
        assert isinstance(result, Tensor)
        return result

    def joined(self, x: Tensor) -> Tensor:
        """The same before the norm."""
        wide = _wide(x)
        streams = wide.view(len(x), self.config.count, -1)
        if self.join is None:
            return streams.mean(dim=1).to(x.dtype)
        (shares,) = self.join(wide)
        return _weighed(streams, shares.sigmoid() + self.config.eps).to(x.dtype)


def _weighed(streams: Tensor, shares: Tensor) -> Tensor:
    """streams [T, S, hidden], shares [T, S] -> [T, hidden]."""
    return (streams * shares.unsqueeze(-1)).sum(dim=1)


def _mixed(streams: Tensor, shares: Tensor) -> Tensor:
    """The same for shares [T, from, to] -> [T, S, hidden]; by stream, as products may be inexact
    where their number of rows changes."""
    parts = zip(streams.unbind(1), shares.unbind(1), strict=True)
    total = torch.zeros_like(streams)
    for stream, given in parts:
        total = total + given.unsqueeze(-1) * stream.unsqueeze(1)
    return total


def _balanced(logits: Tensor, config: StreamConfig) -> Tensor:
    """Rows and columns that add up to 1, by steps of Sinkhorn and Knopp."""
    shares = logits.softmax(dim=-1) + config.eps
    shares = shares / (shares.sum(dim=-2, keepdim=True) + config.eps)
    for _ in range(config.steps - 1):
        shares = shares / (shares.sum(dim=-1, keepdim=True) + config.eps)
        shares = shares / (shares.sum(dim=-2, keepdim=True) + config.eps)
    return shares


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
