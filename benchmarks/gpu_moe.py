"""How close a layer of experts comes to the time that reading its weights takes.

PYTHONPATH=. python3 benchmarks/gpu_moe.py [--shape qwen3-next] [--experts N] [--rows 1,2,4]
    [--format fp8-block] [--formats | --cuts | --ways | --tiles] [--sort-rows 65,128,256]

The floor is the larger of two times: the bytes that must be read (the experts that were chosen, the
shared one, the router) at the speed at which this GPU copies memory, and the products' arithmetic
at 790 TFLOP/s. The layer is checked against the plain module first.
Rows differ from launch to launch, so that the L2 cache never holds what is read next. With --cuts
other ways to cut the two products are tried, for backends/cuda/kernels/moe.py, moe_vector.py. With
--ways few rows go through both of those, for the choice between them in backends/cuda/experts.py.

With --format the experts, shared ones included, are rounded and held as such a checkpoint stores
them; the floor is of their bytes. With --formats the layer is timed in every format instead, in
turns, as ratios to the type that the model computes in; more rows than 64 are those of prompts.

Of many rows the pairs of a row and an expert are sorted: for --sort-rows that is timed by itself
and inside the layer, by the kernel, with several steps, and by PyTorch's operations. The last line
is one JSON document. Without a GPU kernels run in Triton's interpreter: try --shape tiny --rows 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen before triton is imported

from graph_timing import DEVICE, copy_speed, device_name, seconds
from moe_layers import (
    ALONE,
    BY_TILES,
    DTYPE,
    FORMATS,
    LAYERS,
    Layer,
    batches,
    check,
    chosen_by,
    floor_of,
    in_format,
    make,
    needed_bytes,
    weights_of,
)
from moe_tiles import compare_tiles
from moe_ways import compare_ways
from torch import Tensor

from headstart.backends.cuda.experts import moe_terms, routing_of, terms_of
from headstart.backends.cuda.kernels import moe as kernels
from headstart.backends.cuda.kernels import moe_rows, moe_wide_groups
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe import ExpertWeights
from headstart.backends.cuda.kernels.moe_fp8_weights import Fp8Experts
from headstart.backends.cuda.kernels.moe_vector import FEW_ROWS
from headstart.backends.cuda.kernels.routing import choose_experts
from headstart.backends.cuda.kernels.rows import add_norm
from headstart.backends.cuda.kernels.sorting import Lists, sort_pairs, sort_plainly
from headstart.models.feed_forward import MoE

SORT_STEPS = (1024, 2048, 4096)
SORT_REPEATS = 16 if DEVICE.type == "cuda" else 1  # so short that a graph's own start would show


def layer_seconds(block: MoE, layer: Layer, all_x: list[Tensor]) -> float:
    """Of a layer, without the norm that follows; the sum of terms is part of that norm."""
    stream = torch.zeros_like(all_x[0])
    gain = torch.ones(layer.hidden, device=DEVICE, dtype=DTYPE)

    def whole(x: Tensor) -> Tensor:
        return add_norm(stream, moe_terms(x, block, None), gain, 1e-6)

    def norm_alone(x: Tensor) -> Tensor:
        return add_norm(stream, x[None], gain, 1e-6)

    took = seconds([partial(whole, x) for x in all_x])
    return took - seconds([partial(norm_alone, x) for x in all_x])


def measure(block: MoE, layer: Layer, rows: int, speed: float) -> dict[str, Any]:
    all_x = batches(block, layer, rows)
    sizes = [needed_bytes(block, layer, x) for x in all_x]
    took = layer_seconds(block, layer, all_x)
    floor = floor_of(layer, rows, statistics.mean(size for size, _ in sizes), speed)
    return {
        "rows": rows, "experts": statistics.mean(count for _, count in sizes),
        "megabytes": statistics.mean(size for size, _ in sizes) / 1e6,
        "us": took * 1e6, "floor_us": floor * 1e6, "times_floor": took / floor,
    }  # fmt: skip


def parts(block: MoE, layer: Layer, rows: int) -> dict[str, float]:
    """Microseconds of the choice and of the experts' two products, each by itself."""
    all_x, weights = batches(block, layer, rows), weights_of(block)
    routing = routing_of(block, weights.num_shared)
    logits = [(x.float() @ block.router.weight.t())[None] for x in all_x]
    choice = seconds([partial(choose_experts, y, routing) for y in logits])
    said = seconds([partial(terms_of, *k, weights) for k in chosen_by(block, all_x)])
    return {"choice_us": choice * 1e6, "experts_us": said * 1e6}


Sort = Callable[[Tensor, int], Lists]


def sorts() -> dict[str, Sort]:
    """By the kernel, with one step or another, and by PyTorch's operations."""
    by_kernel = {f"kernel {step}": partial(sort_pairs, step=step) for step in SORT_STEPS}
    return {**by_kernel, "plain": sort_plainly}


def check_sorts(chosen: Tensor, num_experts: int) -> None:
    wanted = sort_plainly(chosen, num_experts)
    for name, sort in sorts().items():
        found = sort(chosen, num_experts)
        for part in ("experts", "starts", "order"):
            if not torch.equal(getattr(found, part), getattr(wanted, part)):
                raise SystemExit(f"{name}: the {part} of {chosen.shape[0]} rows differ from plain")


def measure_sorts(block: MoE, layer: Layer, rows: int) -> dict[str, Any]:
    """Microseconds of each way to sort, by itself and as the layer that sorts so."""
    all_x = batches(block, layer, rows)
    num_experts = layer.config.num_experts + weights_of(block).num_shared
    all_chosen = [chosen for _, chosen, _ in chosen_by(block, all_x)]
    check_sorts(all_chosen[0], num_experts)
    alone, whole = dict[str, float](), dict[str, float]()
    for name, sort in sorts().items():
        runs = [partial(sort, chosen, num_experts) for chosen in all_chosen] * SORT_REPEATS
        alone[name] = seconds(runs) * 1e6
        with (
            patch.object(kernels, "sort_pairs", sort), patch.object(moe_rows, "sort_pairs", sort)
        ):  # fmt: skip
            whole[name] = layer_seconds(block, layer, all_x) * 1e6
    return {"rows": rows, "sort_us": alone, "layer_us": whole}


def try_cuts(block: MoE, layer: Layer, rows: int, stride: int) -> None:
    """Each product's cut while the other keeps to one that fits; of few rows both at once."""
    known, weights = chosen_by(block, batches(block, layer, rows)), weights_of(block)
    if rows <= FEW_ROWS and type(weights) in ALONE:
        alone, own = ALONE[type(weights)]
        for pair in itertools.product(own[::stride], own[::stride]):
            took = seconds([partial(alone, *k, weights, pair) for k in known])
            print(f"vector {rows} rows: {took * 1e6:8.1f} us for both, {pair}", flush=True)
    terms, cuts = BY_TILES[type(weights)]
    usual = Shape(outputs=32, inputs=128, warps=4, stages=4)
    if not isinstance(weights, ExpertWeights):
        usual = Shape(outputs=128, inputs=128, warps=4, stages=3)
    for name in ("gate_up", "down"):
        found = []
        for cut in cuts[::stride]:
            if isinstance(weights, Fp8Experts) and name == "gate_up" and cut.outputs < 128:
                continue  # as many outputs as share a scale afterwards
            both = (cut, usual) if name == "gate_up" else (usual, cut)
            try:
                took = seconds([partial(terms, *k, weights, both) for k in known])
            except Exception as error:  # too much shared memory for this cut
                if "OutOfResources" not in type(error).__name__:
                    raise
                continue
            found.append((took, cut))
        found.sort(key=lambda pair: pair[0])
        for best, cut in found[:4]:
            print(f"{name} {rows} rows: {best * 1e6:8.1f} us for both, {cut}", flush=True)


def compare_formats(plain: MoE, layer: Layer, given: argparse.Namespace, speed: float) -> None:
    """The layer in every format, in turns, so that all see the machine in the same state."""
    blocks = {name: in_format(plain, name) for name in FORMATS}
    for name, block in blocks.items():
        errors = [check(plain, block, layer, rows, name) for rows in given.rows]
        print(f"{name} differs from the plain module by {max(errors):.4f}", flush=True)
    print("rows  format          MB       us    floor  times  ratio")
    results = []
    for rows in given.rows:
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in blocks}
        for _ in range(given.repeats):
            for name, block in blocks.items():
                measured[name].append(measure(block, layer, rows, speed))
        best = {
            name: sorted(all_, key=lambda one: one["us"])[len(all_) // 2]
            for name, all_ in measured.items()
        }
        for name, one in best.items():
            ratio = best["as-dtype"]["us"] / one["us"]
            results.append({**one, "format": name, "ratio": ratio})
            print("{rows:4d}  {format:10s} {megabytes:7.1f} {us:8.1f} {floor_us:8.1f} "
                  "{times_floor:6.2f} {ratio:6.2f}".format(**results[-1]), flush=True)  # fmt: skip
    print(json.dumps({"device": device_name(), "torch": torch.__version__, "shape": given.shape,
                      "num_experts": layer.config.num_experts, "copy_bytes_per_second": speed,
                      "formats": results}))  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-next", choices=LAYERS)
    parser.add_argument("--rows", type=numbers, default="1,2,4,8,16,32,64")
    parser.add_argument("--sort-rows", type=numbers, default="65,128,256",
                        help="also time ways to sort the choices of so many")  # fmt: skip
    parser.add_argument("--experts", type=int, help="so many instead of the shape's own")
    parser.add_argument("--format", default="as-dtype", choices=FORMATS, help="of the experts")
    parser.add_argument("--repeats", type=int, default=3, help="turns of --formats")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--formats", action="store_true", help="all formats, as ratios, instead")
    instead.add_argument("--cuts", action="store_true", help="try other cuts instead")
    instead.add_argument("--ways", action="store_true", help="with and without tiles instead")
    instead.add_argument("--tiles", action="store_true", help="tiles of 64 and 128 pairs instead")
    parser.add_argument("--wide", action=argparse.BooleanOptionalAction, default=None,
                        help="4-bit experts of more rows by products of bf16")  # fmt: skip
    parser.add_argument("--stride", type=int, default=3, help="try every n-th cut")
    parser.add_argument("--scanned", type=int, default=kernels.MAX_SCANNED_ROWS,
                        help="sort the choices of more rows than this")  # fmt: skip
    given = parser.parse_args()
    least = LAYERS[given.shape].config.top_k
    if given.experts is not None and given.experts < least:
        parser.error(f"--experts {given.experts}: a row chooses {least}")
    if given.tiles and given.format != parser.get_default("format"):
        parser.error(f"--tiles times plain weights, not --format {given.format}; drop one")
    few = [rows for rows in given.sort_rows if rows <= given.scanned]
    if few:
        parser.error(f"--sort-rows {few[0]}: rows up to {given.scanned} (--scanned) are not sorted")
    wide = moe_wide_groups.IS_SHOWN_ON_GPUS if given.wide is None else given.wide
    with (
        patch.object(kernels, "MAX_SCANNED_ROWS", given.scanned),
        patch.object(moe_wide_groups, "IS_SHOWN_ON_GPUS", wide),
    ):
        run(given)


def run(given: argparse.Namespace) -> None:
    layer = LAYERS[given.shape]
    if given.experts is not None:
        layer = replace(layer, config=replace(layer.config, num_experts=given.experts))
    torch.manual_seed(0)
    plain = make(layer)
    print(device_name(), "torch", torch.__version__, given.shape)
    if given.formats:
        compare_formats(plain, layer, given, copy_speed())
        return
    block = in_format(plain, given.format)
    is_part = given.cuts or given.ways or given.tiles
    for rows in (*given.rows, *(() if is_part else given.sort_rows)):
        error = check(plain, block, layer, rows, given.format)
        print(f"{rows} rows differ from the plain module by {error:.4f}")
    if given.cuts:
        for rows in given.rows:
            try_cuts(block, layer, rows, given.stride)
        return
    if given.ways:
        compare_ways(block, layer, given.rows, given.shape)
        return
    if given.tiles:
        compare_tiles(plain, layer, given.rows, partial(measure, speed=copy_speed()))
        return
    speed = copy_speed()
    print(f"a copy moves {speed / 1e12:.2f} TB/s")
    print("rows experts      MB       us    floor  times  choice  experts")
    results = []
    for rows in given.rows:
        found = {**measure(block, layer, rows, speed), **parts(block, layer, rows)}
        results.append(found)
        print("{rows:4d} {experts:7.1f} {megabytes:7.1f} {us:8.1f} {floor_us:8.1f} "
              "{times_floor:6.2f} {choice_us:7.1f} {experts_us:8.1f}".format(**found),
              flush=True)  # fmt: skip
    sorted_rows = []
    for rows in given.sort_rows:
        found = measure_sorts(block, layer, rows)
        sorted_rows.append(found)
        for name, took in found["sort_us"].items():
            whole = found["layer_us"][name]
            print(f"{rows:4d} rows, sort by {name:11s} {took:8.1f} us, layer {whole:8.1f} us",
                  flush=True)  # fmt: skip
    document = {
        "device": device_name(), "torch": torch.__version__, "shape": given.shape,
        "format": given.format, "num_experts": layer.config.num_experts,
        "copy_bytes_per_second": speed, "rows": results,
        "sorts": sorted_rows,
    }  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
