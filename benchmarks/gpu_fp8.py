"""Microseconds of products in bf16 and with fp8 weights, as the engine computes them.

PYTHONPATH=. python benchmarks/gpu_fp8.py [--rows 1,4,16,64,256,2048] [--only qkv,o] [--cuts]

MiMo-7B sizes. Weights are rotated over copies larger than the L2 cache; launches are captured in a
graph, and the median of its replays counts. Every fp8 product is first compared with torch over
the same weights, dequantised to fp32: a wrong one ends the run. --cuts also tries other cuts of
the fp8 kernels and prints the best, for backends/cuda/kernels/linear.py. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from graph_timing import L2_BYTES, seconds_over

from headstart.backends.cuda.forward import MAX_SKINNY_ROWS, Kernels
from headstart.backends.cuda.fp8 import KernelFp8Linear
from headstart.backends.cuda.kernels.choice import choose_rows
from headstart.backends.cuda.kernels.linear import Shape, gated_linear, partial_linear
from headstart.models.linear import Linear

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008),
    "lm_head": (151680, 4096),
}  # fmt: skip
CUTS = [
    Shape(n, k, splits, w, s)
    for n, k, w, s, splits in itertools.product(
        (32, 64, 128), (64, 128, 256), (4, 8), (3, 5), (1, 2, 4, 8)
    )
]
# bf16 sums of thousands of terms, rounded once or twice.
TOLERANCE = 0.02


def layers_of(outputs: int, inputs: int) -> tuple[list[Linear], list[KernelFp8Linear]]:
    """Copies in bf16, and as many in fp8, that do not fit into the cache."""
    plain = []
    for _ in range(max(2, -(-L2_BYTES // (outputs * inputs)))):
        layer = Linear(0, 0)
        # Rows of different sizes, so that a scale in the wrong place shows.
        sizes = torch.logspace(-2, 0, outputs, device="cuda", dtype=torch.bfloat16)
        values = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(values.mul_(sizes[:, None]), requires_grad=False)
        plain.append(layer)
    return plain, [KernelFp8Linear.of(layer) for layer in plain]


def run_for(name: str, x: torch.Tensor, kernels: Kernels) -> Callable[[Linear], torch.Tensor]:
    """What the engine does with such a layer and so many rows."""
    if name == "gate_up":
        return partial(kernels.gated, x)
    if name != "lm_head":
        return partial(kernels.product, x)
    inv_temps, seeds = torch.zeros(len(x), device="cuda"), torch.zeros(len(x), device="cuda").long()
    return lambda layer: kernels.choose(x, layer, inv_temps, seeds, seeds)


def error_of(name: str, x: torch.Tensor, layer: KernelFp8Linear, found: torch.Tensor) -> float:
    """How far a result is from torch's, relative to the size of it (LM head: of the best logit)."""
    wanted = x.float() @ layer.dequantized(torch.float32).t()
    if name == "lm_head":
        chosen = wanted.gather(1, found[:, None]).squeeze(1)
        return float((1 - chosen / wanted.amax(1)).max())
    if name == "gate_up":
        gate, up = wanted.chunk(2, -1)
        wanted = torch.nn.functional.silu(gate) * up
    else:
        found = found.float().sum(0)
    return float((found.float() - wanted).norm() / wanted.norm())


def cut_for(name: str, x: torch.Tensor, cut: Shape) -> Callable[[Linear], torch.Tensor]:
    if name == "gate_up":
        return lambda layer: gated_linear(x, layer.weight, cut, scales=layer.scales)
    if name == "lm_head":
        inv_temps, seeds = (
            torch.zeros(len(x), device="cuda"),
            torch.zeros(len(x), device="cuda").long(),
        )
        return lambda layer: choose_rows(
            x, layer.weight, inv_temps, seeds, seeds, None, cut, scales=layer.scales
        )
    return lambda layer: partial_linear(x, layer.weight, cut, scales=layer.scales)


def best_cuts(
    name: str, x: torch.Tensor, layers: list[Any], stride: int
) -> list[tuple[float, Shape]]:
    """Microseconds of the three best cuts; sums are kept in fp32, as the engine's are."""
    found = []
    whole = name in ("gate_up", "lm_head")
    for cut in [c for c in CUTS if not whole or c.splits == 1][::stride]:
        try:
            found.append((seconds_over(cut_for(name, x, cut), layers) * 1e6, cut))
        except Exception as error:  # too much shared memory for this cut
            if "OutOfResources" not in type(error).__name__:
                raise
    return sorted(found, key=lambda pair: pair[0])[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,16,64,256,2048")
    parser.add_argument("--only", default="")
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--stride", type=int, default=1, help="try every n-th cut")
    given = parser.parse_args()
    kernels = Kernels()
    results = []
    for name, (outputs, inputs) in SHAPES.items():
        if given.only and name not in given.only.split(","):
            continue
        plain, rounded = layers_of(outputs, inputs)
        copies: list[tuple[str, list[Any]]] = [("bf16", list(plain)), ("fp8", list(rounded))]
        for rows in (int(n) for n in given.rows.split(",")):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            run: Any = run_for(name, x, kernels)
            error = error_of(name, x, rounded[0], run(rounded[0]))
            if not error < TOLERANCE:
                raise SystemExit(f"{name}, {rows} rows: off by {error:.4f}, allowed {TOLERANCE}")
            took = {kind: seconds_over(run, layers) for kind, layers in copies}
            speeds = {
                kind: outputs * inputs * size / took[kind] / 1e12
                for kind, size in (("bf16", 2), ("fp8", 1))
            }
            print(
                f"{name} {rows} rows: "
                + ", ".join(f"{k} {took[k] * 1e6:.1f} us {speeds[k]:.2f} TB/s" for k in took)
                + f", {took['bf16'] / took['fp8']:.2f}x, error {error:.5f}",
                flush=True,
            )
            results.append(
                {"name": name, "rows": rows, "error": round(error, 6)}
                | {f"{kind}_us": round(value * 1e6, 2) for kind, value in took.items()}
            )
            if given.cuts and (rows <= MAX_SKINNY_ROWS or name not in ("gate_up", "lm_head")):
                for best, cut in best_cuts(name, x, copies[1][1], given.stride):
                    print(f"   {best:7.1f} us {cut}", flush=True)
        del plain, rounded, copies
        torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"device": torch.cuda.get_device_name(), **versions, "results": results}))


if __name__ == "__main__":
    main()
