"""Which cut of latent attention is fastest on this GPU, by requests and rows, and its company.

PYTHONPATH=. python3 benchmarks/gpu_latent.py [--requests 1,4,16,80] [--rows 1,4] [--context 768]
    [--heads 128] [--rank 512] [--rope 64] [--nope 128] [--value 128]

As gpu_attention.py: for each number of requests and rows the cut that the engine takes, then the
fastest others; terabytes are those of the latents and rotated keys, read once. The last line of
each is the time of the two products of every head, into the space of latents and back. Sizes are
those of DeepSeek-V3. Without a GPU the kernel runs in Triton's interpreter: try --requests 2
--context 40 --heads 2 --rank 16 --rope 4 --nope 8 --value 8.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass

import torch
from gpu_attention import _CACHES, _SHOWN, DTYPE, PAGE, Contexts, measure
from graph_timing import DEVICE, device_name, seconds_over
from torch import Tensor

from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.backends.cuda.kernels.latent import cut_for, latent_attention
from headstart.backends.cuda.kernels.latent_heads import lift_queries, lower_latents
from headstart.backends.cuda.kernels.latent_rows import Turn

# Tokens of a step, warps, stages, lines of a program.
PROGRAMS = [(64, 8, 2, 64), (32, 8, 3, 64), (32, 8, 5, 64), (64, 8, 3, 32), (32, 8, 4, 32),
            (32, 4, 3, 16), (64, 4, 3, 16)]  # fmt: skip
SHARES = (0.5, 1, 2, 4)  # of the engine's number of pieces


@dataclass(frozen=True)
class Latents(Contexts):
    """Requests whose lifted and turned queries attend; a cache has latents, and no values."""

    turned: Tensor

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.caches[0][0].shape[1] * DTYPE.itemsize

    def run(self, cut: Cut, at: int = 0, usual: Tensor | None = None) -> Tensor:
        return latent_attention(
            self.q, self.turned, self.caches[at][0], self.tables, self.seen, scale=0.1,
            block_size=PAGE, max_context=self.max_context, cut=cut,
        )  # fmt: skip


def make(requests: int, rows: int, given: argparse.Namespace) -> Latents:
    each = -(-(given.context + rows) // PAGE)
    draw = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=DEVICE).to(DTYPE)

    tables = (
        torch.randperm(requests * each, generator=draw, device=DEVICE).view(requests, each).int()
    )
    entries = [normal(requests * each * PAGE, given.rank + given.rope) for _ in range(_CACHES)]
    seen = torch.full((requests,), given.context - rows, dtype=torch.int32, device=DEVICE)
    lifted, turned = (
        normal(requests, rows, given.heads, size) for size in (given.rank, given.rope)
    )
    return Latents(lifted, [(part, part) for part in entries], tables, seen, each * PAGE, turned)


def cuts_of(requests: int, lines: int) -> list[Cut]:
    """The engine's, and others around it."""
    own = cut_for(requests, lines, DTYPE.itemsize)
    found = [own]
    for share, (step, warps, stages, most) in itertools.product(SHARES, PROGRAMS):
        pieces = max(1, int(own.pieces * share))
        tile = min(most, own.lines)
        found.append(Cut(pieces, 64, step=step, warps=warps, stages=stages, lines=tile))
    return list(dict.fromkeys(found)) if DEVICE.type == "cuda" else found[:2]


def products(count: int, given: argparse.Namespace) -> float:
    """Seconds of the products of all heads for `count` rows, into the space of latents and back."""
    width = given.heads * (given.nope + given.rope)
    partial = torch.randn(2, count, width, device=DEVICE)
    cos, sin = torch.randn(2, 64, given.rope, device=DEVICE).to(DTYPE).unbind()
    turn = Turn(cos, sin, True, torch.arange(count, device=DEVICE) % 64)
    shape = (given.heads, given.nope + given.value, given.rank)
    ups = [torch.randn(shape, device=DEVICE).to(DTYPE) for _ in range(2 * _CACHES)]

    def run(own: Tensor) -> Tensor:
        return lower_latents(lift_queries(partial, own, given.nope, turn)[0], own, given.nope)

    return seconds_over(run, ups)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="1,4,16,80")
    parser.add_argument("--rows", default="1,4")
    sizes = {"context": 768, "heads": 128, "rank": 512, "rope": 64, "nope": 128, "value": 128}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    results = []
    print(device_name(), "torch", torch.__version__)
    for requests, rows in itertools.product(
        *(map(int, n.split(",")) for n in (given.requests, given.rows))
    ):
        found = measure(make(requests, rows, given), cuts_of(requests, rows * given.heads))
        around = round(products(requests * rows, given) * 1e6, 1)
        results.append({"requests": requests, "rows": rows, "cuts": found, "products_us": around})
        for place, row in enumerate(found[: 1 + _SHOWN]):
            name = "the engine's" if place == 0 else ""
            print(f"{requests:4} requests, {rows} rows {row['us']:8} us "
                  f"{row['tb_per_second']:5} TB/s {row['cut']} {name}", flush=True)  # fmt: skip
        print(f"{requests:4} requests, {rows} rows {around:8} us products of heads", flush=True)
    print(json.dumps({"device": device_name(), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
