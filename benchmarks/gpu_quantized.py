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
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen before triton is imported

import triton
from graph_timing import DEVICE, L2_BYTES, device_name, seconds_over
from torch import Tensor
from torch.nn.functional import silu

from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.fp8_library import library_fp8, library_scales
from headstart.backends.cuda.kernels.eight_bits import (
    GROUP,
    Fp8Rows,
    IntegerRows,
    fp8_rows,
    integer_rows,
    silu_fp8,
    silu_integers,
)
from headstart.backends.cuda.kernels.fp8_products import choose_fp8, gated_fp8, partial_fp8
from headstart.backends.cuda.kernels.fp8_tiles import BLOCK
from headstart.backends.cuda.kernels.group_packing import (
    PackedGroups,
    dequantized_groups,
    packed_groups,
)
from headstart.backends.cuda.kernels.groups import choose_groups, partial_groups
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.rows import silu_product
from headstart.models.linear import Linear

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008),
    "lm_head": (151680, 4096), "tiny": (256, 256),
}  # fmt: skip
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
# Sums of a step keep few bits; SiLU's result is rounded to e4m3 where the kernel does that.
TOLERANCE, ROUNDED_TOLERANCE = 0.01, 0.05
SHOWN = 3
MAX_OWN_ROWS = 512

Fp8Weight = tuple[Tensor, Tensor]
Way = tuple[str, Callable[[Any], Any]]  # a name, and what it does with a copy of the weight


@dataclass
class Search:
    """What was found so far, and how much time is left."""

    stop: float
    found: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.stop


# --- weights ------------------------------------------------------------------------------------


def plain_weight(outputs: int, inputs: int) -> Linear:
    layer = Linear(0, 0)
    # Rows of different sizes, so that a scale in the wrong place shows.
    sizes = torch.logspace(-1, 0, outputs, device=DEVICE, dtype=DTYPE)
    values = torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE)
    layer.weight = torch.nn.Parameter(values.mul_(sizes[:, None]), requires_grad=False)
    return layer


def fp8_values(outputs: int, inputs: int) -> Tensor:
    # Seven times the mean size is still a number of the format.
    return torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE).mul_(60).to(torch.float8_e4m3fn)


def row_weight(outputs: int, inputs: int) -> Fp8Weight:
    return fp8_values(outputs, inputs), torch.logspace(-3, -2, outputs, device=DEVICE)


def block_weight(outputs: int, inputs: int) -> Fp8Weight:
    scales = torch.rand(-(-outputs // BLOCK), -(-inputs // BLOCK), device=DEVICE)
    return fp8_values(outputs, inputs), (0.5 + scales) / 100


def int4_weight(outputs: int, inputs: int) -> PackedGroups:
    codes = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
    scales = (0.5 + torch.rand(outputs, inputs // GROUP, device=DEVICE)) / 10
    return packed_groups(codes, scales.to(torch.bfloat16), None, 4)


WEIGHTS: dict[str, Callable[[int, int], Any]] = {
    "bf16": plain_weight, "row": row_weight, "block": block_weight, "int4": int4_weight,
}  # fmt: skip
NUM_BYTES = {"bf16": 2.0, "row": 1.0, "block": 1.0, "int4": 0.5 + 2 / GROUP}


def copies_of(form: str, outputs: int, inputs: int) -> list[Any]:
    size = outputs * inputs * NUM_BYTES[form]
    count = max(2, -(-L2_BYTES // int(size))) if DEVICE.type == "cuda" else 1
    return [WEIGHTS[form](outputs, inputs) for _ in range(count)]


def dense(weight: Any) -> Tensor:
    """W in fp32."""
    if isinstance(weight, Linear):
        return weight.weight.float()
    if isinstance(weight, PackedGroups):
        low, high = (weight.weight << 4) >> 4, weight.weight >> 4  # with their signs
        halves = [part.view(len(part), -1, 1, weight.half) for part in (low, high)]
        codes = torch.cat(halves, 2).flatten(1).float()
        return codes.mul_(weight.scales.t().float().repeat_interleave(weight.group, 1))
    values: Tensor = weight[0]
    scales: Tensor = weight[1]
    if scales.dim() == 1:
        return values.float() * scales[:, None]
    wide = scales.repeat_interleave(BLOCK, 0)[: values.shape[0]]
    return values.float() * wide.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


# --- rows and results -----------------------------------------------------------------------------


def dense_rows(rows: Tensor | Fp8Rows | IntegerRows) -> Tensor:
    """What rounded rows stand for."""
    if isinstance(rows, Tensor):
        return rows.float()
    values = rows.values.float()
    group = rows.group or values.shape[1]
    values = values * rows.scales.repeat_interleave(group, 0)[: values.shape[1]].t()
    return values[::2] + values[1::2] if isinstance(rows, IntegerRows) else values


def error_of(name: str, wanted: Tensor, found: Any) -> float:
    """Relative to the size of what is wanted (LM head: of the best logit)."""
    if name == "lm_head":
        chosen = wanted.gather(1, found[:, None]).squeeze(1)
        return float((1 - chosen / wanted.amax(1)).max())
    if name == "gate_up":
        gate, up = wanted.chunk(2, -1)
        wanted = silu(gate) * up
    if isinstance(found, Tensor):
        found = found.float().sum(0) if found.dim() == 3 else found.float()
    else:
        found = dense_rows(found)
    return float((found - wanted).norm() / wanted.norm())


# --- cuts -----------------------------------------------------------------------------------------


def splits_of(name: str, outputs: int, inputs: int, tile: int, rows: int) -> list[int]:
    """One to three programs for each processor, and two kilobytes of a line for each."""
    if name in ("gate_up", "lm_head"):
        return [1]
    programs = -(-outputs // tile) * -(-rows // 128)
    fits = [s for s in (1, 2, 4, 8) if 90 <= programs * s <= 520 and inputs // s >= 1024]
    return fits or [1]


def fp8_cuts(name: str, outputs: int, inputs: int, rows: int) -> Iterator[tuple[Shape, bool]]:
    """Cuts, and whether the copy engine fetches tiles."""
    if DEVICE.type == "cpu":
        cut = Shape(64, 128, 1 if name == "gate_up" else 2)
        yield from ((cut, streams) for streams in (False, True))
        return
    if rows <= 16:
        tiles = [(64, 256, 4, 3), (64, 256, 4, 4), (64, 128, 4, 4), (64, 128, 4, 6),
                 (64, 512, 4, 3)]  # fmt: skip
        streamed = [(64, 256, 4, 4), (64, 128, 4, 6)]
    elif rows <= 64:
        tiles = [(64, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6)]
        streamed = [(64, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 8, 4)]
    else:
        tiles = [(64, 128, 4, 4), (128, 128, 8, 3)]
        streamed = [(64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 8, 3), (128, 128, 8, 4)]
    for streams, (n, k, warps, stages) in itertools.chain(
        ((False, cut) for cut in tiles), ((True, cut) for cut in streamed)
    ):
        for splits in splits_of(name, outputs, inputs, n, rows):
            yield Shape(n, k, splits, warps, stages), streams


def int4_cuts(name: str, outputs: int, inputs: int, rows: int) -> Iterator[Shape]:
    if DEVICE.type == "cpu":
        yield Shape(64, 256, 1)
        return
    if rows <= 16:
        tiles = [(64, 256, 4, 4), (64, 256, 4, 6), (64, 512, 4, 3), (64, 512, 4, 4),
                 (128, 256, 8, 4)]  # fmt: skip
    else:
        tiles = [(64, 256, 4, 3), (64, 256, 4, 4), (128, 256, 8, 3), (64, 256, 8, 3)]
    for n, k, warps, stages in tiles:
        for splits in splits_of(name, outputs, inputs, n, rows):
            yield Shape(n, k, splits, warps, stages)


def cut_name(cut: Shape) -> str:
    return f"{cut.outputs}x{cut.inputs} s{cut.splits} w{cut.warps} d{cut.stages}"


# --- ways -----------------------------------------------------------------------------------------


def noise_of(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    return zeros.float(), zeros, zeros


def engine_way(name: str, x: Tensor) -> Way:
    kernels = Kernels()
    if name == "gate_up":
        return "engine", lambda layer: kernels.gated(x, layer)
    if name == "lm_head":
        return "engine", lambda layer: kernels.choose(x, layer, *noise_of(len(x)))
    return "engine", lambda layer: kernels.product(x, layer)


def fp8_ways(name: str, rows: Fp8Rows, cut: Shape, *, streams: bool) -> Iterator[Way]:
    label = f"r{rows.group} {cut_name(cut)}{' tma' if streams else ''}"
    if name == "gate_up":
        yield (
            f"fused {label}",
            lambda w: gated_fp8(rows, w[0], w[1], cut, streams=streams, dtype=DTYPE),
        )
        yield (
            f"then silu {label}",
            lambda w: silu_fp8(partial_fp8(rows, w[0], w[1], cut, streams=streams)),
        )
    elif name == "lm_head":
        noise = noise_of(rows.shape[0])
        yield label, lambda w: choose_fp8(rows, w[0], w[1], *noise, None, cut, streams=streams)
    else:
        yield label, lambda w: partial_fp8(rows, w[0], w[1], cut, streams=streams)


def int4_ways(name: str, rows: IntegerRows, cut: Shape) -> Iterator[Way]:
    label = cut_name(cut)
    if name == "gate_up":
        yield f"then silu {label}", lambda w: silu_integers(partial_groups(rows, w, cut))
    elif name == "lm_head":
        noise = noise_of(rows.shape[0])
        yield label, lambda w: choose_groups(rows, w, *noise, None, cut)
    else:
        yield label, lambda w: partial_groups(rows, w, cut)


def fp8_library(name: str, rows: Fp8Rows) -> Iterator[Way]:
    """By torch, which tells the recipe from the scales; a choice is not included."""

    def product(weight: Fp8Weight) -> Tensor:
        found = library_fp8(rows, weight[0], library_scales(weight[1]), torch.bfloat16)
        return silu_product(found) if name == "gate_up" else found

    yield f"torch._scaled_mm r{rows.group}", product


def int4_library(name: str, x: Tensor) -> Way:
    def product(weight: PackedGroups) -> Tensor:
        return torch.mm(x, dequantized_groups(weight, x.dtype).t())

    if name == "gate_up":
        return "to bf16, torch.mm, SiLU", lambda w: silu_product(product(w))
    return "to bf16, torch.mm", product


# --- the search -----------------------------------------------------------------------------------


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
        given: dict[int, Any] = {}
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
            found = fp8_search(search, name, form, x, copies, reference, given)
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
    given: dict[int, Any],
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
