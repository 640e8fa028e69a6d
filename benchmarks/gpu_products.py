"""What a layer's matrix products take by number of rows, and the rate that they reach.

PYTHONPATH=. python3 benchmarks/gpu_products.py [--rows 64:2048:64] [--hidden 4096]
    [--intermediate 11008] [--qkv 6144] [--out products.json]

Passes over prompts and rounds are captured for some numbers of rows
(`headstart/backends/cuda/packed.py`), and rows that a captured size has too many are multiplied for
nothing. On the other hand a library cuts its work into tiles that fit some numbers better than
others. So: for each number of rows the microseconds of the four products of a layer, in TFLOP/s,
and what a row costs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from graph_timing import DEVICE, device_name, seconds

DTYPE = torch.bfloat16
_COPIES = 3  # of every matrix, one after another, as the layers of a model are


def measure(rows: int, shapes: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Microseconds of each product."""
    found = {}
    for name, (outputs, inputs) in shapes.items():
        x = torch.randn(rows, inputs, device=DEVICE, dtype=DTYPE)
        weights = torch.randn(_COPIES, outputs, inputs, device=DEVICE, dtype=DTYPE)
        runs = [lambda w=w, x=x: torch.mm(x, w.t()) for w in weights.unbind()]
        found[name] = seconds(runs * 4) * 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="64:2048:64", help="from:to:step")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--qkv", type=int, default=6144)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    hidden, wide = given.hidden, given.intermediate
    shapes = {
        "qkv": (given.qkv, hidden), "o": (hidden, hidden), "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
    }  # fmt: skip
    flops = 2 * sum(outputs * inputs for outputs, inputs in shapes.values())
    first, last, step = map(int, given.rows.split(":"))
    print(device_name(), "torch", torch.__version__)
    rows = []
    for count in range(first, last + 1, step):
        each = {name: round(took, 1) for name, took in measure(count, shapes).items()}
        whole = sum(each.values())
        row = {"rows": count, **each, "us": round(whole, 1), "us_per_row": round(whole / count, 3)}
        row["tflops"] = round(flops * count / whole / 1e6)
        rows.append(row)
        parts = ", ".join(f"{name} {took}" for name, took in each.items())
        print(
            f"{count:5} rows: {row['us']:8} us ({parts}), {row['us_per_row']} us a row, "
            f"{row['tflops']} TFLOP/s",
            flush=True,
        )
    document = {"device": device_name(), "torch": torch.__version__, "rows": rows}
    if given.out is not None:
        given.out.write_text(json.dumps(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
