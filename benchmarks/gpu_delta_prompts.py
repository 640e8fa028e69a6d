"""Prompts through the kernels of a gated delta net: right, and how fast in which tiles.

PYTHONPATH=. python3 benchmarks/gpu_delta_prompts.py [--shapes next,27b] [--fla] [--skip-old]

First every case is compared with the plain module in fp64 (PASS or FAIL, beside the difference of
the plain module in bf16): what rows read, and all states that are kept. Then the device's time of
one layer without its two products (replays of a captured graph): in several tiles, and as plain
PyTorch does it (the host's time included, which is what that takes). The floor is the larger of
bytes and arithmetic. Without a GPU all is tiny, and says only that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from graph_timing import DEVICE, copy_speed, device_name, seconds, wall
from torch import Tensor

from headstart.backends.cuda.compiling import compiled_together
from headstart.backends.cuda.kernels.delta_chunks import ChunkTile, DeltaWeights, prepare_chunks
from headstart.backends.cuda.kernels.delta_prompts import WalkTile, walk
from headstart.backends.cuda.recurrent_prompts import PromptRows, PromptTiles, tiles_for
from headstart.models.delta_config import DeltaConfig
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, empty_states

IS_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
SHAPES: dict[str, tuple[int, DeltaConfig]] = {
    "next": (2048, DeltaConfig(k_heads=16, v_heads=32, k_dim=128, v_dim=128, kernel=4)),
    "27b": (5120, DeltaConfig(k_heads=16, v_heads=48, k_dim=128, v_dim=128, kernel=4)),
    "odd": (96, DeltaConfig(k_heads=2, v_heads=2, k_dim=48, v_dim=80, kernel=3)),
    "small": (64, DeltaConfig(k_heads=2, v_heads=4, k_dim=32, v_dim=32, kernel=4)),
    "tiny": (32, DeltaConfig(k_heads=1, v_heads=2, k_dim=16, v_dim=12, kernel=4)),
}
BLOCK = 16
CHECKED = ([1], [3, 1, 64], [65, 7, 200], [1000, 130, 64, 2, 23], [2500])
TIMED = {"1 x 2500": [2500], "8 x 1000": [1000] * 8, "1 x 30000": [30000]}
CHUNK_TILES = (
    ChunkTile(), ChunkTile(registers=None), ChunkTile(registers=128), ChunkTile(stages=2),
    ChunkTile(conv_rows=16, conv_warps=2), ChunkTile(conv_rows=16),
)  # fmt: skip
WALK_TILES = (
    WalkTile(32, 4, 3), WalkTile(64, 4, 3), WalkTile(64, 4, 2), WalkTile(128, 8, 2),
)  # fmt: skip
TENSOR_FLOPS = 900e12  # of bf16 in a second, on an H200


def make_net(shape: str) -> DeltaNet:
    """Some heads hardly fade, some at once."""
    hidden, config = SHAPES[shape]
    with torch.device(DEVICE):
        net = DeltaNet(hidden, config, 1e-6)
        net.a_log.data = torch.linspace(-7, 2, config.v_heads)
    for value in (net.inputs.weight, net.out.weight):
        value.data.normal_(0, value.shape[1] ** -0.5)
    for parameter, size in ((net.conv, 0.5), (net.dt_bias, 1.0)):
        parameter.data.normal_(0, size)
    net.norm.data.normal_(1, 0.1)
    return net.to(DTYPE)


def make_spans(rows: Sequence[int], *, keeps: bool) -> list[StateSpan]:
    """Text i begins in slot 3 i, where there is one, ends there, and leaves up to two snapshots."""
    result = []
    for text, (start, stop) in enumerate(pairwise(accumulate(rows, initial=0))):
        count, slots = stop - start, []
        if keeps:
            ends = sorted({(count - 1) // BLOCK * BLOCK, count // 2 // BLOCK * BLOCK} - {0})
            slots = [(end, 3 * text + 1 + at) for at, end in enumerate(ends)]
        source = 3 * text if text % 2 else None
        result.append(StateSpan(start, stop, source, (*slots, (count, 3 * text))))
    return result


def make_states(config: DeltaConfig, texts: int, dtype: torch.dtype) -> LayerStates:
    states = empty_states(config, 3 * texts, dtype, DEVICE)
    draw = torch.Generator(DEVICE).manual_seed(1)
    for tensor in (states.conv, states.memory):
        tensor.copy_(torch.randn(tensor.shape, generator=draw, device=DEVICE))
    return states


def make_rows(count: int, hidden: int) -> Tensor:
    """A third of them repeats one row: equal keys are the hardest for the inverse."""
    x = torch.randn(count, hidden, device=DEVICE)
    x[torch.rand(count, device=DEVICE) < 0.33] = x[0].clone()
    return x.to(DTYPE)


def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def widened(net: DeltaNet) -> DeltaNet:
    return deepcopy(net).double()


def check(shape: str, net: DeltaNet, rows: list[int], tiles: PromptTiles | None = None) -> bool:
    """Against fp64; the plain module in the model's own type says what to expect."""
    hidden, config = SHAPES[shape]
    spans, x = make_spans(rows, keeps=True), make_rows(sum(rows), hidden)
    results, kept = [], []
    for own, dtype in ((widened(net), torch.float64), (net, DTYPE)):
        states = make_states(config, len(rows), DTYPE)
        if dtype == torch.float64:
            states = LayerStates(states.conv.double(), states.memory.double())
        results.append(own(x.to(dtype), None, SlotRecurrence(states, spans)))
        kept.append(states)
    states = make_states(config, len(rows), DTYPE)
    tiles = tiles or tiles_for(len(rows), config)
    read = PromptRows.of(spans, DEVICE).run(net, net.inputs(x), states, tiles)
    results.append(net.out(read))
    kept.append(states)
    wanted, plain, found = results
    gaps = [gap(found, wanted), gap(states.memory, kept[0].memory)]
    before = [gap(plain, wanted), gap(kept[1].memory, kept[0].memory)]
    conv = gap(states.conv, kept[0].conv)
    is_right = all(own < 2 * other + 4e-3 for own, other in zip(gaps, before, strict=True))
    is_right = is_right and conv < 1e-2
    print(
        f"{'PASS' if is_right else 'FAIL'} {shape:5} {rows!s:28} results {gaps[0]:.5f} (plain "
        f"{before[0]:.5f}), memories {gaps[1]:.5f} ({before[1]:.5f}), inputs {conv:.5f}",
        flush=True,
    )
    return is_right


def floor_seconds(config: DeltaConfig, rows: int, speed: float) -> tuple[float, float]:
    """Of bytes that must be read and written between the products, and of arithmetic."""
    each = config.channels + 2 * config.values + 2 * config.v_heads
    chunk = config.k_dim * (4 * 64 + 2 * config.v_dim) + 2 * config.v_dim * 64
    chunk += config.v_dim * config.k_dim  # what a chunk of 64 rows multiplies, by row
    return rows * each * 2 / speed, 2 * rows * config.v_heads * chunk / TENSOR_FLOPS


class Case:
    """One layer's rows, made once."""

    def __init__(self, shape: str, net: DeltaNet, rows: list[int]):
        self.net, self.config, self.rows = net, SHAPES[shape][1], rows
        spans = make_spans(rows, keeps=True)
        self.plan = PromptRows.of(spans, DEVICE)
        self.spans, self.x = spans, make_rows(sum(rows), SHAPES[shape][0])
        self.states = make_states(self.config, len(rows), DTYPE)
        self.projected = net.inputs(self.x)
        self.weights = DeltaWeights(net.conv.squeeze(1), net.a_log, net.dt_bias)
        self.made = self.prepare(ChunkTile())

    def prepare(self, tile: ChunkTile) -> Any:
        return prepare_chunks(
            self.projected, self.weights, self.states.conv, self.plan.chunks, self.config, tile
        )

    def walk(self, tile: WalkTile) -> Tensor:
        return walk(
            self.made, self.projected, self.net.norm, self.net.eps, self.states, self.plan.walks,
            self.config, tile,
        )  # fmt: skip

    def all(self) -> Tensor:
        tiles = tiles_for(len(self.rows), self.config)
        return self.plan.run(self.net, self.projected, self.states, tiles)

    def layer(self) -> Tensor:
        tiles = tiles_for(len(self.rows), self.config)
        projected = self.net.inputs(self.x)
        result: Tensor = self.net.out(self.plan.run(self.net, projected, self.states, tiles))
        return result

    def library(self) -> Callable[[], Any]:
        """The rule alone by flash-linear-attention, from rows that are convolved and gated."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

        config, total = self.config, sum(self.rows)
        keys, values = config.k_heads * config.k_dim, (1, total, config.v_heads)
        q, k, v = self.made.mixed.split([keys, keys, config.values], 1)
        group = config.v_heads // config.k_heads
        q, k = (
            part.reshape(total, config.k_heads, config.k_dim).repeat_interleave(group, 1)[None]
            for part in (q, k)
        )
        edges = torch.tensor([0, *accumulate(self.rows)], device=DEVICE)
        given = {
            "q": q, "k": k, "v": v.reshape(*values, config.v_dim).contiguous(),
            "g": -torch.rand(values, device=DEVICE), "beta": torch.rand(values, device=DEVICE),
            "initial_state": self.states.memory[::3].contiguous(),
            "cu_seqlens": edges,
        }  # fmt: skip
        return partial(chunk_gated_delta_rule, scale=1.0, output_final_state=True, **given)

    def old(self) -> None:
        self.net(self.x, None, SlotRecurrence(self.states, self.spans))


def microseconds(run: Any) -> float:
    return seconds([run] * (4 if IS_GPU else 1)) * 1e6


def compile_tiles(shape: str, net: DeltaNet) -> None:
    """All of them side by side, which takes a fraction of the time."""
    case = Case(shape, net, [130, 70])
    with compiled_together():
        for tile in CHUNK_TILES:
            case.prepare(tile)
        for walk_tile in WALK_TILES:
            case.walk(walk_tile)


def measure(shape: str, net: DeltaNet, name: str, given: argparse.Namespace) -> dict[str, Any]:
    rows = [-(-count // (1 if IS_GPU else 100)) for count in TIMED[name]]
    case = Case(shape, net, rows)
    bytes_s, flops_s = floor_seconds(case.config, sum(rows), given.speed)
    found: dict[str, Any] = {
        "shape": shape, "case": name, "bytes_us": bytes_s * 1e6, "flops_us": flops_s * 1e6,
        "rule_us": microseconds(case.all), "layer_us": microseconds(case.layer),
    }  # fmt: skip
    if not given.skip_tiles:
        for tile in CHUNK_TILES:
            found[str(tile)] = microseconds(partial(case.prepare, tile))
        for walk_tile in WALK_TILES:
            try:
                found[str(walk_tile)] = microseconds(partial(case.walk, walk_tile))
            except Exception as error:  # more than fits, most likely
                found[str(walk_tile)] = str(error)[:80]
    if given.fla:
        try:
            found["fla_rule_us"] = microseconds(case.library())
        except Exception as error:  # not installed, or made for another Triton
            found["fla_rule_us"] = str(error)[:80]
    if not given.skip_old:
        case.old()
        found["old_us"] = min(wall(case.old) for _ in range(2)) * 1e6
    print(f"{shape} {name}")
    for key, value in found.items():
        if key not in ("shape", "case"):
            print(
                f"    {key:52} {value:10.1f}" if isinstance(value, float) else f"    {key} {value}"
            )
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="next,27b" if IS_GPU else "tiny,odd")
    parser.add_argument("--cases", default=",".join(TIMED))
    parser.add_argument("--fla", action="store_true", help="time flash-linear-attention, too")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-tiles", action="store_true")
    parser.add_argument("--skip-old", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    given.speed = copy_speed()
    print(device_name(), "torch", torch.__version__, f"copies {given.speed / 1e12:.2f} TB/s")
    are_right, found = True, []
    names = given.shapes.split(",")
    for shape in [] if given.skip_checks else [*names, *(["odd", "small"] if IS_GPU else [])]:
        net = make_net(shape)
        if IS_GPU:
            started = time.perf_counter()
            compile_tiles(shape, net)
            print(f"{shape} compiled in {time.perf_counter() - started:.1f} s")
        for rows in CHECKED if IS_GPU else CHECKED[1:3]:
            are_right &= check(shape, net, rows)
        if IS_GPU and shape in names:  # in every tile
            for tile in WALK_TILES:
                print(tile, end=" ")
                try:
                    are_right &= check(shape, net, CHECKED[3], PromptTiles(ChunkTile(), tile))
                except Exception as error:
                    print(str(error)[:80])
    for shape in names:
        net = make_net(shape)
        for case in given.cases.split(","):
            found.append(measure(shape, net, case, given))
    print(json.dumps({"device": device_name(), "torch": torch.__version__, "is_right": are_right,
                      "copy_bytes_per_second": given.speed, "cases": found}))  # fmt: skip
    print("all PASS" if are_right else "some FAIL")
    raise SystemExit(0 if are_right else 1)


if __name__ == "__main__":
    main()
