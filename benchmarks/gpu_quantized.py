"""Microseconds of products with 8- and 4-bit weights beside those of bf16, over a search of cuts.

PYTHONPATH=. python3 benchmarks/gpu_quantized.py [--rows 4,64,320,1,16,128] [--only qkv,o]
    [--formats row,block,int4] [--seconds 200] [--json FILE]

MiMo-7B's matrices. `row`: e4m3 with a scale per output, `block`: per 128 x 128, `int4`: 4 bits in
groups of 128. bf16 is what the engine does with as many rows; ratios are to it. Rows are rounded
before the clock starts, since the kernels before a product do that, and by themselves in the last
lines. Weights are rotated over copies larger than the L2 cache; launches are captured in a graph,
and the median of its replays counts. Every way is first compared with torch over the same rounded
numbers; a wrong one is named, left out, and makes the program fail at the end.

A way is named by its kernel and rows (r128: a scale per 128 inputs, r0: per row), its cut (outputs
x inputs of a step, splits, warps, stages) and `tma` where the copy engine fetches tiles. The
results so far are written to the JSON file after every matrix. Without a GPU kernels are
interpreted: try --only tiny --rows 2.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen before triton is imported

import triton
from graph_timing import DEVICE, device_name, seconds_over
from quantized_ways import (
    Way,
    engine_way,
    fp8_cuts,
    fp8_library,
    fp8_ways,
    int4_cuts,
    int4_library,
    int4_ways,
)
from quantized_weights import (
    DTYPE,
    NUM_BYTES,
    SHAPES,
    copies_of,
    dense,
    dense_rows,
    error_of,
)
from torch import Tensor

from headstart.backends.cuda.kernels.eight_bits import (
    GROUP,
    fp8_rows,
    integer_rows,
    silu_fp8,
    silu_integers,
)

# Sums of a step keep few bits; SiLU's result is rounded to e4m3 where the kernel does that.
TOLERANCE, ROUNDED_TOLERANCE = 0.01, 0.05
SHOWN = 3
MAX_OWN_ROWS = 512


@dataclass
class Search:
    """What was found so far, and how much time is left."""

    stop: float
    found: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.stop


# --- rows and results -----------------------------------------------------------------------------


# --- ways -----------------------------------------------------------------------------------------


def compile_together(ways: Sequence[Way], copy: Any) -> None:
    if DEVICE.type == "cpu":
        return
    from headstart.backends.cuda.compiling import compiled_together

    try:
        with compiled_together():
            for _, run in ways:
                run(copy)
    except Exception as error:  # it is met again, and named, when that way is tried
        print(f"   not compiled together: {str(error)[:150]}", flush=True)


def timed_ways(
    search: Search, name: str, ways: Sequence[Way], copies: Sequence[Any], wanted: Tensor
) -> list[tuple[float, str, float]]:
    """Seconds, name and error of each way that is right."""
    found = []
    compile_together([way for way in ways if "torch." not in way[0]], copies[0])
    for label, run in ways:
        if search.is_over:
            break
        try:
            result = run(copies[0])
            is_choice = result.dtype == torch.int64 if isinstance(result, Tensor) else False
            kind = "" if name == "lm_head" and not is_choice else name  # logits of a library
            error = error_of(kind, wanted, result)
            is_rounded = not isinstance(result, Tensor)
            if not error < (ROUNDED_TOLERANCE if is_rounded else TOLERANCE):
                search.wrong.append(f"{name} {label}: off by {error:.4f}")
                print(f"   WRONG {search.wrong[-1]}", flush=True)
                continue
            del result
            found.append((seconds_over(run, copies), label, error))
        except Exception as error:  # a cut that does not fit, or a library without the recipe
            words = str(error).strip().splitlines() or [""]
            print(f"   left out: {label}: {type(error).__name__}: {words[0][:150]}", flush=True)
    return sorted(found)


def measure(search: Search, name: str, rows: int, held: dict[str, list[Any]]) -> None:
    outputs, inputs = SHAPES[name]
    x = torch.randn(rows, inputs, device=DEVICE, dtype=DTYPE)
    base = 0.0
    for form, copies in held.items():
        if search.is_over:
            return
        reference = dense(copies[0])
        if form == "bf16":
            found = timed_ways(
                search, name, [engine_way(name, x)], copies, x.float() @ reference.t()
            )
        elif form == "int4":
            integers = integer_rows(x)
            wanted = dense_rows(integers) @ reference.t()
            ways = [
                way
                for cut in int4_cuts(name, outputs, inputs, rows)
                for way in int4_ways(name, integers, cut)
            ]
            found = timed_ways(search, name, ways, copies, wanted) if rows <= MAX_OWN_ROWS else []
            if rows > 16 and DEVICE.type == "cuda":
                wanted = x.float() @ reference.t()
                found += timed_ways(search, name, [int4_library(name, x)], copies, wanted)
        else:
            found = fp8_search(search, name, form, x, copies, reference)
        if not found:
            continue
        found.sort()
        best = found[0][0]
        base = best if form == "bf16" else base
        terabytes = outputs * inputs * NUM_BYTES[form] / best / 1e12
        ratio = f" {base / best:.2f}x" if base else ""
        print(f"{name} {rows} rows {form}: {best * 1e6:.1f} us {terabytes:.2f} TB/s{ratio}")
        for took, label, error in found[:SHOWN] if form != "bf16" else ():
            print(f"   {took * 1e6:7.1f} us {label} (error {error:.5f})", flush=True)
        search.found.append(
            {
                "name": name, "rows": rows, "format": form, "us": round(best * 1e6, 2),
                "ways": [[label, round(took * 1e6, 2), round(error, 6)]
                         for took, label, error in found],
            }
        )  # fmt: skip
        del reference


def fp8_search(
    search: Search, name: str, form: str, x: Tensor, copies: Sequence[Any], reference: Tensor,
) -> list[tuple[float, str, float]]:  # fmt: skip
    """All cuts with a scale per 128 inputs; the best ones with other groups of rows; libraries."""
    outputs, inputs = SHAPES[name]
    rows = len(x)
    made = {group: fp8_rows(x, group) for group in (GROUP, GROUP // 2, 0)}
    wanted = {group: dense_rows(made[group]) @ reference.t() for group in made}
    cuts = list(fp8_cuts(name, outputs, inputs, rows))
    by_label = {}
    for cut, streams in cuts:
        for label, run in fp8_ways(name, made[GROUP], cut, streams=streams):
            by_label[label] = (cut, streams, run)
    ways = [(label, run) for label, (_, _, run) in by_label.items()]
    found = timed_ways(search, name, ways, copies, wanted[GROUP]) if rows <= MAX_OWN_ROWS else []
    others = ([0] if form == "row" else []) + ([GROUP // 2] if name == "down" else [])
    best = [label for _, label, _ in found[:SHOWN]]  # before others, with labels of their own
    for group in others:
        again = [
            way
            for label in best
            for way in fp8_ways(name, made[group], by_label[label][0], streams=by_label[label][1])
            if way[0].split(" r")[0] == label.split(" r")[0] or name != "gate_up"
        ]
        found = sorted(found + timed_ways(search, name, again, copies, wanted[group]))
    if rows >= 16 and DEVICE.type == "cuda":
        group = 0 if form == "row" else GROUP
        libraries = list(fp8_library(name, made[group]))
        found += timed_ways(search, name, libraries, copies, wanted[group])
    return found


def rounding(rows: int, search: Search) -> None:
    """Rounding rows by a kernel of its own, where the one before does not do it."""
    inner = SHAPES["down"][1] if DEVICE.type == "cuda" else SHAPES["tiny"][1]
    x = torch.randn(rows, SHAPES["tiny"][1] if DEVICE.type == "cpu" else 4096, device=DEVICE)
    x, product = x.to(DTYPE), torch.randn(1, rows, 2 * inner, device=DEVICE)
    ways: list[Way] = [
        ("fp8_rows r128", lambda x: fp8_rows(x)), ("fp8_rows r0", lambda x: fp8_rows(x, 0)),
        ("integer_rows", integer_rows), ("silu_fp8", lambda _: silu_fp8(product)),
        ("silu_integers", lambda _: silu_integers(product)),
    ]  # fmt: skip
    took = {label: round(seconds_over(run, [x, x]) * 1e6, 2) for label, run in ways}
    print(f"rounding {rows} rows, us: {took}", flush=True)
    search.found.append({"name": "rounding", "rows": rows, "us": took})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="4,64,320,1,16,128")
    parser.add_argument("--only", default="qkv,o,gate_up,down,lm_head")
    parser.add_argument("--formats", default="row,block,int4")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    search = Search(time.monotonic() + given.seconds)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(device_name(), versions, flush=True)
    names = given.only.split(",")
    held = {
        name: {form: copies_of(form, *SHAPES[name]) for form in ["bf16", *given.formats.split(",")]}
        for name in names
    }
    print(f"weights made, {search.stop - time.monotonic():.0f} s left", flush=True)
    for rows in (int(count) for count in given.rows.split(",")):
        for name in names:
            if search.is_over:
                break
            measure(search, name, rows, held[name])
            if given.json:
                document = {"device": device_name(), **versions, "results": search.found}
                given.json.write_text(json.dumps(document, indent=1))
        if not search.is_over:
            rounding(rows, search)
    left = search.stop - time.monotonic()
    print(f"{'out of time' if search.is_over else f'done, {left:.0f} s left'}")
    if search.wrong:
        raise SystemExit("wrong results:\n" + "\n".join(search.wrong))


if __name__ == "__main__":
    main()
