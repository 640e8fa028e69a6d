"""How close a layer of experts comes to the time that reading its weights takes.

PYTHONPATH=. python3 benchmarks/gpu_moe.py [--shape qwen3-next] [--rows 1,2,4] [--cuts]

The floor is the bytes that must be read (the experts that were chosen, the shared one, the router)
over the speed at which this GPU copies memory. The layer is checked against the plain module first.
Rows differ from launch to launch, so that the L2 cache never holds what is read next. With --cuts
other ways to cut the two products are tried; the best are to be entered in
headstart/kernels/moe.py. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.gpu.experts import moe_terms, routing_of
from headstart.kernels import moe as kernels
from headstart.kernels.linear import Shape
from headstart.kernels.moe import ExpertWeights, expert_terms
from headstart.kernels.routing import choose_experts
from headstart.kernels.rows import add_norm
from headstart.models.moe import MoE
from headstart.models.moe_config import MoeConfig

L2_BYTES = 120 << 20
CUTS = [
    Shape(outputs=n, inputs=k, warps=w, stages=s)
    for n, k, w, s in itertools.product((16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (2, 3, 4, 5))
    if 2048 <= n * k <= 128 * 128
]


@dataclass(frozen=True)
class Layer:
    hidden: int
    config: MoeConfig


def _config(**sizes: Any) -> MoeConfig:
    usual = {"shared_gate": False, "correction": False, "num_groups": 1, "top_groups": 1,
             "renormalise": True, "least_sum": 1e-20, "scale": 1.0}  # fmt: skip
    return MoeConfig(**{**usual, **sizes})


LAYERS = {
    "qwen3-next": Layer(2048, _config(
        num_experts=512, top_k=10, width=512, shared_width=512, shared_gate=True, scoring="softmax",
    )),
    "glm-4.5-air": Layer(4096, _config(
        num_experts=128, top_k=8, width=1408, shared_width=1408, scoring="sigmoid", correction=True,
    )),
    "ernie-4.5-21b": Layer(2560, _config(
        num_experts=64, top_k=6, width=1536, shared_width=3072, scoring="softmax", correction=True,
    )),
}  # fmt: skip


def seconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Of one run, from replays of a graph that holds all of them."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1e3)
    return statistics.median(times[1:]) / len(runs)


def copy_speed() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds([lambda: target.copy_(source)] * 4)


def make(layer: Layer) -> MoE:
    with torch.device("cuda"):
        block = MoE(layer.config, layer.hidden)
    block = block.bfloat16()
    for value in [*block.parameters(), *block.buffers()]:
        value.data.normal_(0, layer.hidden**-0.5)
    return block


def needed_bytes(block: MoE, layer: Layer, x: Tensor) -> tuple[int, int]:
    """What must be read for rows x, and how many experts they touch."""
    touched = int(block.router(x)[0].unique().numel())
    config = layer.config
    experts = touched * 3 * config.width * layer.hidden * 2
    shared = 3 * config.shared_width * layer.hidden * 2
    return experts + shared + block.router.weight.numel() * 4, touched


def check(block: MoE, layer: Layer, rows: int) -> float:
    """The largest difference from the plain module, in parts of its largest number."""
    x = torch.randn(rows, layer.hidden, device="cuda", dtype=torch.bfloat16)
    found, wanted = moe_terms(x, block, None).float().sum(0), block(x).float()
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    if not worst < 0.03:
        raise SystemExit(f"{rows} rows differ from the plain module by {worst:.3f}")
    return worst


def batches(block: MoE, layer: Layer, rows: int) -> list[Tensor]:
    """Rows that touch more than the cache holds, several times over."""
    first = torch.randn(rows, layer.hidden, device="cuda", dtype=torch.bfloat16)
    count = max(4, -(-4 * L2_BYTES // needed_bytes(block, layer, first)[0]))
    return [first, *(torch.randn_like(first) for _ in range(count - 1))]


def measure(block: MoE, layer: Layer, rows: int, speed: float) -> dict[str, Any]:
    all_x = batches(block, layer, rows)
    sizes = [needed_bytes(block, layer, x) for x in all_x]
    stream = torch.zeros_like(all_x[0])
    gain = torch.ones(layer.hidden, device="cuda", dtype=torch.bfloat16)

    def whole(x: Tensor) -> Tensor:
        return add_norm(stream, moe_terms(x, block, None), gain, 1e-6)

    def norm_alone(x: Tensor) -> Tensor:
        return add_norm(stream, x[None], gain, 1e-6)

    took = seconds([partial(whole, x) for x in all_x])
    # The sum of terms is part of the norm that follows; what the norm takes anyhow is not ours.
    took -= seconds([partial(norm_alone, x) for x in all_x])
    floor = statistics.mean(size for size, _ in sizes) / speed
    return {
        "rows": rows, "experts": statistics.mean(count for _, count in sizes),
        "megabytes": statistics.mean(size for size, _ in sizes) / 1e6,
        "us": took * 1e6, "floor_us": floor * 1e6, "times_floor": took / floor,
    }  # fmt: skip


def weights_of(block: MoE) -> ExpertWeights:
    assert block.shared is not None
    return ExpertWeights(
        block.experts.gate_up.weight, block.experts.down.weight, block.shared.gate_up.weight,
        block.shared.down.weight,
    )  # fmt: skip


Chosen = tuple[Tensor, Tensor, Tensor]  # rows, their experts, the weights of those


def chosen_by(block: MoE, all_x: list[Tensor]) -> list[Chosen]:
    routing = routing_of(block, weights_of(block).num_shared)
    result = []
    for x in all_x:
        logits = (x.float() @ block.router.weight.t())[None]
        result.append((x, *choose_experts(logits, routing, block.router.correction)))
    return result


def parts(block: MoE, layer: Layer, rows: int) -> dict[str, float]:
    """Microseconds of the choice and of the experts' two products, each by itself."""
    all_x, weights = batches(block, layer, rows), weights_of(block)
    routing = routing_of(block, weights.num_shared)
    logits = [(x.float() @ block.router.weight.t())[None] for x in all_x]
    choice = seconds([partial(choose_experts, y, routing) for y in logits])
    said = seconds([partial(expert_terms, *k, weights) for k in chosen_by(block, all_x)])
    return {"choice_us": choice * 1e6, "experts_us": said * 1e6}


def try_cuts(block: MoE, layer: Layer, rows: int, stride: int) -> None:
    """Each product's cut while the other keeps to one that always fits."""
    known, weights = chosen_by(block, batches(block, layer, rows)), weights_of(block)
    usual = Shape(outputs=32, inputs=128, warps=4, stages=4)
    for name in ("gate_up", "down"):
        found = []
        for cut in CUTS[::stride]:
            both = (cut, usual) if name == "gate_up" else (usual, cut)
            try:
                took = seconds([partial(expert_terms, *k, weights, both) for k in known])
            except Exception as error:  # too much shared memory for this cut
                if "OutOfResources" not in type(error).__name__:
                    raise
                continue
            found.append((took, cut))
        found.sort(key=lambda pair: pair[0])
        for best, cut in found[:4]:
            print(f"{name} {rows} rows: {best * 1e6:8.1f} us for both, {cut}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-next", choices=LAYERS)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--cuts", action="store_true", help="try other cuts instead")
    parser.add_argument("--stride", type=int, default=3, help="try every n-th cut")
    parser.add_argument("--scanned", type=int, default=kernels.MAX_SCANNED_ROWS,
                        help="sort the choices of more rows than this")  # fmt: skip
    given = parser.parse_args()
    kernels.MAX_SCANNED_ROWS = given.scanned
    layer = LAYERS[given.shape]
    torch.manual_seed(0)
    block = make(layer)
    all_rows = [int(n) for n in given.rows.split(",")]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, given.shape)
    for rows in (*all_rows, 300):
        print(f"{rows} rows are right within {check(block, layer, rows):.4f}")
    if given.cuts:
        for rows in all_rows:
            try_cuts(block, layer, rows, given.stride)
        return
    speed = copy_speed()
    print(f"a copy moves {speed / 1e12:.2f} TB/s")
    print("rows experts      MB       us    floor  times  choice  experts")
    results = []
    for rows in all_rows:
        found = {**measure(block, layer, rows, speed), **parts(block, layer, rows)}
        results.append(found)
        print("{rows:4d} {experts:7.1f} {megabytes:7.1f} {us:8.1f} {floor_us:8.1f} "
              "{times_floor:6.2f} {choice_us:7.1f} {experts_us:8.1f}".format(**found),
              flush=True)  # fmt: skip
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                "shape": given.shape, "copy_bytes_per_second": speed, "rows": results}  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
