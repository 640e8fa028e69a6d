"""Which cut of the products is fastest on this GPU, by weight shape and rows.

PYTHONPATH=. python3 benchmarks/gpu_kernels.py [--rows 1,4,16] [--only qkv,o] [--stride 4]

Every weight is rotated over copies larger than the L2 cache, launches are captured in a graph.
Prints the best cuts of each shape beside cuBLAS: up to 16 rows for backends/cuda/kernels/linear.py,
up to 80 for streamed.py. `lm_head int8` is the LM head of drafts (int8.py, int8_choice.py), up to
128 rows. cuBLAS has no sum of splits and no SiLU or arg-max behind it, which the others save.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from graph_timing import L2_BYTES, seconds_over

from headstart.backends.cuda.forward import MAX_SKINNY_ROWS
from headstart.backends.cuda.kernels.choice import choose_rows
from headstart.backends.cuda.kernels.int8_choice import chooser_for
from headstart.backends.cuda.kernels.linear import Shape, gated_linear, partial_linear
from headstart.backends.cuda.kernels.streamed import MAX_ROWS, streamed_gated, streamed_linear

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 11008), "fuse": (4096, 8192),
    "gate_up": (22016, 4096), "lm_head": (151680, 4096), "lm_head 32k": (32768, 4096),
    "lm_head int8": (151680, 4096),
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
    if name == "gate_up" or name.startswith("lm_head"):
        return CUTS[::stride]
    split = [Shape(c.outputs, c.inputs, s, c.warps, c.stages) for c in CUTS for s in SPLITS]
    return [cut for cut in split if cut.outputs >= 32][::stride]


def runner(name: str, x: torch.Tensor, cut: Shape) -> Callable[[torch.Tensor], Any] | None:
    """What a cut is for, given a weight; None where no kernel of ours takes so many rows."""
    rows = x.shape[0]
    if name.startswith("lm_head"):
        inv_temps = torch.zeros(rows, device="cuda")
        seeds = torch.zeros(rows, dtype=torch.int64, device="cuda")
        if name == "lm_head int8":
            chooser, scales = chooser_for(x), torch.ones(SHAPES[name][0], device="cuda")
            if chooser is None:
                return None
            return lambda weight: chooser(x, weight, scales, inv_temps, seeds, seeds, None, cut)
        if rows > MAX_SKINNY_ROWS:
            return None
        return lambda weight: choose_rows(x, weight, inv_temps, seeds, seeds, None, cut)
    if rows > MAX_ROWS:
        return None
    if name == "gate_up":
        gated = gated_linear if rows <= MAX_SKINNY_ROWS else streamed_gated
        return lambda weight: gated(x, weight, cut)
    linear = partial_linear if rows <= MAX_SKINNY_ROWS else streamed_linear
    return lambda weight: linear(x, weight, cut)


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
        kind = torch.int8 if name.endswith("int8") else torch.bfloat16
        size = outputs * inputs * kind.itemsize
        weights = [
            (torch.randn(outputs, inputs, device="cuda") * 40).to(kind)
            for _ in range(max(2, -(-L2_BYTES // size)))
        ]
        in_bf16 = [weight.bfloat16() for weight in weights]
        for rows in (int(n) for n in given.rows.split(",")):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            library = seconds_over(partial(by_library, x), in_bf16)
            found = []
            for cut in candidates(name, given.stride):
                run = runner(name, x, cut)
                if run is None:
                    break
                try:
                    found.append((seconds_over(run, weights), cut))
                except Exception as error:  # too much shared memory for this cut
                    if "OutOfResources" not in type(error).__name__:
                        raise
            found.sort(key=lambda pair: pair[0])
            speed = outputs * inputs * 2 / library / 1e12
            print(f"{name} {rows} rows: cuBLAS in bf16 {library * 1e6:.1f} us {speed:.2f} TB/s")
            for best, cut in found[:3]:
                print(f"   {best * 1e6:7.1f} us {size / best / 1e12:.2f} TB/s {cut}", flush=True)


if __name__ == "__main__":
    main()
