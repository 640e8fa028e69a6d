"""Which cut of the skinny products is fastest on this GPU, by weight shape and rows.

PYTHONPATH=. python3 benchmarks/gpu_kernels.py [--rows 1,4,16]

Every weight is rotated over copies larger than the L2 cache, launches are captured in a graph.
Prints the best cut of each shape, to be entered in headstart/kernels/linear.py, beside cuBLAS.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from graph_timing import L2_BYTES, seconds_over

from headstart.kernels.choice import choose_rows
from headstart.kernels.linear import Shape, gated_linear, partial_linear

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 11008), "fuse": (4096, 8192),
    "gate_up": (22016, 4096), "lm_head": (151680, 4096), "lm_head 32k": (32768, 4096),
}  # fmt: skip
CUTS = [
    Shape(outputs=n, inputs=k, warps=w, stages=s)
    for n, k, w, s in itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 5))
    if n * k * s * 2 <= 160 * 1024 and n * k >= 2048
]
SPLITS = (1, 2, 4, 8)


def by_library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t())


def candidates(name: str, stride: int) -> list[Shape]:
    if name in ("gate_up", "lm_head", "lm_head 32k"):
        return CUTS[::stride]
    split = [Shape(c.outputs, c.inputs, s, c.warps, c.stages) for c in CUTS for s in SPLITS]
    return [cut for cut in split if cut.outputs >= 32][::stride]


def runner(name: str, x: torch.Tensor, cut: Shape) -> Callable[[torch.Tensor], Any]:
    if name == "gate_up":
        return lambda weight: gated_linear(x, weight, cut)
    if name.startswith("lm_head"):
        heat = torch.zeros(x.shape[0], device="cuda")
        seeds = torch.zeros(x.shape[0], dtype=torch.int64, device="cuda")
        return lambda weight: choose_rows(x, weight, heat, seeds, seeds, None, cut)
    return lambda weight: partial_linear(x, weight, cut)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--only", default="")
    parser.add_argument("--stride", type=int, default=1, help="try every n-th cut")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name, (outputs, inputs) in SHAPES.items():
        if given.only and name not in given.only.split(","):
            continue
        size = outputs * inputs * 2
        weights = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
            for _ in range(max(2, -(-L2_BYTES // size)))
        ]
        for rows in (int(n) for n in given.rows.split(",")):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            library = seconds_over(partial(by_library, x), weights)
            found = []
            for cut in candidates(name, given.stride):
                try:
                    found.append((seconds_over(runner(name, x, cut), weights), cut))
                except Exception as error:  # too much shared memory for this cut
                    if "OutOfResources" not in type(error).__name__:
                        raise
            found.sort(key=lambda pair: pair[0])
            speed = size / library / 1e12
            print(f"{name} {rows} rows: cuBLAS {library * 1e6:.1f} us {speed:.2f} TB/s")
            for best, cut in found[:3]:
                print(f"   {best * 1e6:7.1f} us {size / best / 1e12:.2f} TB/s {cut}", flush=True)


if __name__ == "__main__":
    main()
