"""Microseconds of products of 17 to 512 rows with weights of 4 bits, by way and cut.

PYTHONPATH=. python3 benchmarks/gpu_wide_groups.py [--rows 64,32,128,320] [--only qkv,o]
    [--seconds 60] [--json FILE]

MiMo-7B's matrices, groups of 128, with zero points and without. `bf16` is what the engine does with
plain weights, `integers` are pairs of integer rows (kernels/groups.py), `wide` codes that become
bf16 in registers (kernels/wide_groups.py) with several cuts: outputs, splits, warps, stages, most
registers; the first is the one that the engine takes, and the fastest others are shown. Rows are
rounded or laid out before the clock starts, and timed by themselves at the end. Every way is
compared with torch first; a wrong one is named and not timed. Weights are rotated over copies
larger than the L2 cache. Without a GPU kernels are interpreted: try --only tiny --rows 17.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen before triton is imported

from graph_timing import DEVICE, L2_BYTES, device_name, seconds_over
from torch import Tensor

from headstart.backends.cuda.compiling import compiled_together
from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.kernels.eight_bits import integer_rows
from headstart.backends.cuda.kernels.group_packing import (
    PackedGroups,
    dequantized_groups,
    packed_groups,
)
from headstart.backends.cuda.kernels.groups import partial_groups
from headstart.backends.cuda.kernels.wide_groups import (
    WideCut,
    parted_rows,
    parted_silu,
    partial_wide,
    wide_cut,
)
from headstart.models.linear import Linear

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008),
    "tiny": (256, 512),
}  # fmt: skip
GROUP = 128
# outputs of a program, warps, stages, most registers, rows of a tile at most
CUTS = [
    (128, 8, 3, None), (128, 8, 2, None), (128, 8, 4, None), (128, 8, 2, 128), (64, 4, 3, None),
    (64, 4, 2, 168), (256, 16, 3, None), (256, 16, 2, None),
]  # fmt: skip
_SHOWN = 6
_MOST_ERROR = 0.004  # of the result's norm: rows of integers keep less than bf16 does
Way = tuple[str, Callable[[Any], Tensor]]


def weight(outputs: int, inputs: int, has_zeros: bool) -> PackedGroups:
    codes = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
    scales = (0.5 + torch.rand(outputs, inputs // GROUP, device=DEVICE)) / inputs
    zeros = torch.randint(4, 12, scales.shape, device=DEVICE).byte() if has_zeros else None
    return packed_groups(codes, scales.to(torch.float16), zeros, 4)


def cuts(outputs: int, inputs: int, rows: int) -> Iterator[WideCut]:
    own = wide_cut(outputs, inputs, rows)
    yield own
    for tile, warps, stages, registers in CUTS if DEVICE.type == "cuda" else []:
        programs = -(-outputs // tile) * -(-rows // 128)
        for splits in (1, 2, 3, 4, 6, 8):
            other = WideCut(tile, splits, warps, stages, registers)
            is_full = 80 <= programs * splits <= 520 * 64 // min(tile, 128)
            if other != own and is_full and inputs // splits >= 512:
                yield other


def measure(name: str, rows: int, *, has_zeros: bool) -> list[dict[str, Any]]:
    outputs, inputs = SHAPES[name]
    count = 1 + 4 * L2_BYTES * 2 // (outputs * inputs) if DEVICE.type == "cuda" else 1
    copies = [weight(outputs, inputs, has_zeros) for _ in range(count)]
    x = torch.randn(rows, inputs, device=DEVICE, dtype=DTYPE)
    plain = dequantized_groups(copies[0], torch.float32)
    wanted = x.float() @ plain.t()
    integers, parted = integer_rows(x), parted_rows(x, copies[0].half)
    ways: list[Way] = [("integers", partial(partial_groups, integers))] if rows <= 192 else []
    for cut in cuts(outputs, inputs, rows):
        label = f"wide {cut.outputs} s{cut.splits} w{cut.warps} d{cut.stages} r{cut.registers}"
        ways.append((label, partial(partial_wide, parted, cut=cut)))
    if DEVICE.type == "cuda":
        with suppress(Exception), compiled_together():  # what fails is met again below
            for _, run in ways:
                run(copies[0])
    found = []
    for label, run in ways:
        try:
            result = run(copies[0]).sum(0)
        except Exception as problem:  # a cut that does not fit
            print(f"   left out: {label}: {type(problem).__name__}", flush=True)
            continue
        error = float((result - wanted).norm() / wanted.norm())
        if not error < _MOST_ERROR:
            print(f"   WRONG: {name} {label} is off by {error:.4f}", flush=True)
            continue
        found.append({"way": label, "us": seconds_over(run, copies) * 1e6})
    if not has_zeros:
        own = []
        for _ in range(max(1, count // 4)):
            layer = Linear(0, 0)
            layer.weight = torch.nn.Parameter(plain.to(DTYPE, copy=True), requires_grad=False)
            own.append(layer)
        took = seconds_over(lambda layer: Kernels().product(x, layer), own)
        found.append({"way": "bf16", "us": took * 1e6})
    kept = {"name": name, "rows": rows, "has_zeros": has_zeros}
    return [{**kept, **one} for one in found]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="64,32,128,320")
    parser.add_argument("--only", default="qkv,o,gate_up,down")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began, results = time.monotonic(), []
    print(device_name(), "torch", torch.__version__, flush=True)
    for rows in (int(count) for count in given.rows.split(",")):
        for name in given.only.split(","):
            for has_zeros in (True, False):
                if time.monotonic() - began > given.seconds:
                    break
                found = measure(name, rows, has_zeros=has_zeros)
                results += found
                kind = "zeros" if has_zeros else "plain"
                own = [one for one in found if not one["way"].startswith("wide")]
                wide = [one for one in found if one not in own]
                shown = [*own, *wide[:1], *sorted(wide[1:], key=lambda one: one["us"])[:_SHOWN]]
                said = ", ".join(f"{one['way']} {one['us']:.1f}" for one in shown)
                print(f"{rows:4d} rows {name:8s} {kind}: {said}", flush=True)
                if given.json:
                    document = {"device": device_name(), "results": results}
                    given.json.write_text(json.dumps(document, indent=1))
        x = torch.randn(rows, 4096 if DEVICE.type == "cuda" else 512, device=DEVICE, dtype=DTYPE)
        laid: dict[str, Callable[[Tensor], Any]] = {
            "integer_rows": integer_rows,
            "parted_rows": partial(parted_rows, half=GROUP),
            "parted_silu": lambda x: parted_silu(x.unsqueeze(0), GROUP, x.dtype),
        }
        took = {label: round(seconds_over(run, [x, x]) * 1e6, 2) for label, run in laid.items()}
        print(f"{rows:4d} rows laid out, us: {took}", flush=True)


if __name__ == "__main__":
    main()
