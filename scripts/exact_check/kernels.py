"""Every step that a row of the trunk goes through, beside any other rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from exact_check.sizes import Sizes
from headstart.backends.cuda.attending import EVERYTHING
from headstart.backends.cuda.exact import ExactKernels, filled
from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.kernels.rows import add_norm, place_qkv
from headstart.backends.cuda.sampling import choose_rows
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.sampling.params import Row, SamplingParams

PAGE = 16
Run = Callable[[Tensor], Tensor]  # which rows, in which order -> their results [n, ...]


class Rig:
    """Random weights and rows, and every step that a row of the trunk goes through."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype):
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.kernels = ExactKernels(sizes.positions)
        self._draw = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=self._draw, device=self.device) * scale
        return made.to(self.dtype)

    def layer(self, outputs: int, inputs: int) -> Linear:
        result = Linear(0, 0)
        result.weight = torch.nn.Parameter(
            self.random(outputs, inputs, scale=inputs**-0.5), requires_grad=False
        )
        return result

    def steps(self) -> Iterator[tuple[str, Run]]:
        s = self.sizes
        for name, outputs, inputs in (
            ("qkv", s.qkv, s.hidden), ("o", s.hidden, s.heads * s.dim),
            ("down", s.hidden, s.intermediate),
        ):  # fmt: skip
            yield f"product {name}", self._product(outputs, inputs)
        yield "gated product", self._gated()
        yield "residual and norm", self._norm()
        for has_norms in (False, True):
            yield f"q, k, v{' with norms' if has_norms else ''}", self._qkv(has_norms)
        yield "attention", self._attention()
        yield from self._lm_head()

    def _product(self, outputs: int, inputs: int) -> Run:
        x, layer = self.random(self.sizes.rows, inputs), self.layer(outputs, inputs)
        return lambda rows: self.kernels.product(filled(x[rows]), layer).transpose(0, 1)[
            : len(rows)
        ]

    def _gated(self) -> Run:
        s = self.sizes
        x, layer = self.random(s.rows, s.hidden), self.layer(2 * s.intermediate, s.hidden)
        return lambda rows: self.kernels.gated(filled(x[rows]), layer)[: len(rows)]

    def _norm(self) -> Run:
        s = self.sizes
        stream, partial = self.random(s.rows, s.hidden), self.random(s.rows, 4, s.hidden).float()
        gain = self.random(s.hidden)

        def run(rows: Tensor) -> Tensor:
            own, sums = filled(stream[rows]), filled(partial[rows]).transpose(0, 1).contiguous()
            own = own.clone()
            return torch.cat([add_norm(own, sums, gain, 1e-5), own], 1)[: len(rows)]

        return run

    def _qkv(self, has_norms: bool) -> Run:
        s = self.sizes
        partial, bias = self.random(s.rows, 2, s.qkv).float(), self.random(s.qkv)
        norms = (self.random(s.dim), self.random(s.dim)) if has_norms else None
        cos, sin = self.random(s.rows, s.dim), self.random(s.rows, s.dim)
        slots = torch.arange(s.rows, device=self.device)

        def run(rows: Tensor) -> Tensor:
            k, v = (self.random(s.rows, s.kv_heads, s.dim) for _ in range(2))
            q = place_qkv(
                filled(partial[rows]).transpose(0, 1).contiguous(), bias, norms, 1e-5, cos, sin,
                filled(slots[rows]), filled(slots[rows].int(), -1), k, v, s.heads,
                each=self.kernels.heads_each,
            )  # fmt: skip
            return torch.cat([q[: len(rows)], k[rows], v[rows]], 1)

        return run

    def _attention(self) -> Run:
        s = self.sizes
        blocks = -(-s.context // PAGE)
        cache = LayerCache(*(self.random(blocks * PAGE, s.kv_heads, s.dim) for _ in range(2)))
        q = self.random(s.rows, s.heads, s.dim)
        host = torch.Generator().manual_seed(1)
        order = torch.stack([torch.randperm(blocks, generator=host) for _ in range(s.rows)])
        seen = torch.randint(0, s.context, (s.rows,), generator=host)
        tables, slots = order.int().to(self.device), seen.int().to(self.device)

        def run(rows: Tensor) -> Tensor:
            attend = self.kernels.by_row(tables[rows], slots[rows], PAGE)
            return attend(filled(q[rows]), cache, EVERYTHING)[: len(rows)]

        return run

    def _lm_head(self) -> Iterator[tuple[str, Run]]:
        s = self.sizes
        x, layer = self.random(s.rows, s.hidden, scale=4), self.layer(s.vocab, s.hidden)
        numbers = torch.arange(s.rows, device=self.device)
        noise = (torch.full((s.rows,), 0.8, device=self.device), numbers * 7, numbers + 100)
        cuts = [
            Row(SamplingParams(temperature=1.25, top_k=at % 3 * 20, top_p=0.9, min_p=0.01), at, at)
            for at in range(s.rows)
        ]
        yield "logits", lambda rows: self.kernels.whole(x[rows], layer)
        yield (
            "choice",
            lambda rows: self.kernels.choose(x[rows], layer, *(n[rows] for n in noise)),
        )
        yield (
            "truncated choice",
            lambda rows: (
                choose_rows(
                    self.kernels.whole(x[rows], layer), [cuts[at] for at in rows.tolist()]
                ).tokens
            ),
        )


def orders(count: int, device: str) -> Iterator[Tensor]:
    """Every number of rows, then every place of every row."""
    rows = torch.arange(count, device=device)
    yield from (rows[:number] for number in range(1, count + 1))
    yield from (rows.roll(by) for by in range(1, count))


def differing(run: Run, count: int, device: str) -> int:
    """In how many orders a row has other bits than alone."""
    alone = torch.cat([run(torch.tensor([row], device=device)) for row in range(count)])
    return sum(not torch.equal(run(order), alone[order]) for order in orders(count, device))


def check_kernels(sizes: Sizes, device: str, dtype: torch.dtype) -> dict[str, int]:
    rig = Rig(sizes, device, dtype)
    found = {}
    for name, run in rig.steps():
        found[name] = differing(run, sizes.rows, device)
        print(f"{name}: {found[name]} orders differ", file=sys.stderr, flush=True)
    x, layer = rig.random(sizes.rows, sizes.hidden), rig.layer(sizes.hidden, sizes.hidden)
    plain = Kernels()

    def by_library(rows: Tensor) -> Tensor:
        return plain.whole(x[rows], layer)

    return {**found, "plain library product": differing(by_library, sizes.rows, device)}
