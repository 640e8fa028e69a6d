"""Ways through the experts of few rows beside each other; `gpu_moe.py --ways` runs this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from graph_timing import seconds
from torch import Tensor

from headstart.gpu import experts
from headstart.kernels.linear import Shape
from headstart.kernels.moe import ExpertWeights, expert_terms
from headstart.kernels.moe_few import few_terms
from headstart.kernels.moe_vector import MOST_ROWS
from headstart.kernels.routing import choose_experts
from headstart.models.moe import MoE

Cuts = tuple[Shape, Shape] | None  # None: by rule
Chosen = tuple[Tensor, Tensor, Tensor]  # rows, their experts, the weights of those
# What waits for other programs comes last: should it wait for ever, the others are told already.
WAYS = ("apart", "ahead", "early", "vector", "one")
_TILED: list[Cuts] = [
    None,
    (Shape(16, 128, warps=2, stages=4), Shape(32, 128, warps=2, stages=4)),
    (Shape(32, 128, warps=4, stages=3), Shape(64, 128, warps=4, stages=3)),
    (Shape(16, 256, warps=4, stages=3), Shape(16, 256, warps=4, stages=3)),
]
_VECTORS: list[Cuts] = [
    None,
    (Shape(4, 1024), Shape(8, 512)),
    (Shape(2, 2048), Shape(8, 512, warps=2)),
    (Shape(8, 1024), Shape(16, 512, warps=8)),
]
_GATE_STEPS = (512, 1024, 2048)
_MANY_ROWS = 16  # above, cuts for few rows are not tried


def measure_ways(
    known: Sequence[Chosen], weights: ExpertWeights, layer: Callable[[], float], speed: float
) -> list[dict[str, Any]]:
    """Microseconds of both products by every way and cut, and of the layer by each way's best."""
    rows = known[0][0].shape[0]
    floor = sum(needed_bytes(chosen, weights) for _, chosen, _ in known) / len(known) / speed
    wanted, results = expert_terms(*known[0], weights).float().sum(0), []
    for way in WAYS:
        found = []
        for cuts in cuts_of(way, rows):
            try:
                said = few_terms(*known[0], weights, way, cuts).float().sum(0)
                took = seconds([partial(few_terms, *k, weights, way, cuts) for k in known])
            except Exception as error:  # too much shared memory, or a compiler that lacks something
                print(f"{rows:4d} rows {way:7s} {cuts}: {type(error).__name__} {error}", flush=True)
                continue
            worst = float((said - wanted).abs().max() / wanted.abs().max())
            if not worst < 0.03:
                raise SystemExit(f"{way} {cuts}: {rows} rows differ from apart by {worst:.3f}")
            found.append((took, cuts))
        if not found:
            continue
        for took, cuts in found:
            print(f"{rows:4d} rows {way:7s} {took * 1e6:8.1f} us, {took / floor:5.2f} times the "
                  f"bytes', {cuts or 'by rule'}", flush=True)  # fmt: skip
        took, cuts = min(found, key=lambda pair: pair[0])
        whole = dict[str, float]()
        for name, is_chained in (("layer", False), ("chained layer", True)):
            if is_chained and way not in ("early", "vector"):
                continue
            with patch.multiple(experts, few_terms=_by(way, cuts), IS_CHAINED=is_chained):
                whole[name] = layer() * 1e6
            print(f"{rows:4d} rows {way:7s} {whole[name]:8.1f} us, {name}", flush=True)
        results.append({
            "rows": rows, "way": way, "us": took * 1e6, "times_floor": took / floor,
            "by_rule_us": next((t * 1e6 for t, own in found if own is None), None),
            "cuts": None if cuts is None else [vars(cut) for cut in cuts],
            "layer_us": whole,
        })  # fmt: skip
    return results


def cuts_of(way: str, rows: int) -> list[Cuts]:
    if way == "apart":
        return [None]
    if way == "vector":
        return _VECTORS if rows <= MOST_ROWS else []  # more go early
    return _TILED if rows <= _MANY_ROWS else _TILED[::2]


def needed_bytes(chosen: Tensor, weights: ExpertWeights) -> int:
    """Of the experts that were chosen, the shared ones among them."""
    routed = len({number for number in chosen.flatten().tolist() if number < len(weights.down)})
    each = 3 * weights.down.shape[1] * weights.down.element_size()  # for one of its columns
    return each * (routed * weights.width + weights.shared_width)


def _by(way: str, cuts: Cuts) -> Callable[..., Tensor]:
    def terms(
        x: Tensor, chosen: Tensor, shares: Tensor, own: ExpertWeights, _: str, *, is_chained: bool
    ) -> Tensor:
        return few_terms(x, chosen, shares, own, way, cuts, is_chained=is_chained)

    return terms


def measure_gates(block: MoE, all_x: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Microseconds of the choice with the shared expert's gate, by how it is read."""
    if block.shared_gate is None:
        return []
    rows, results = all_x[0].shape[0], []
    logits = [(x.float() @ block.router.weight.t())[None] for x in all_x]
    for step in _GATE_STEPS:
        runs = [
            partial(
                choose_experts, own, experts.routing_of(block, 1), block.router.correction,
                gate=(x, block.shared_gate.weight), gate_step=step,
            )
            for own, x in zip(logits, all_x, strict=True)
        ]  # fmt: skip
        took = seconds(runs) * 1e6
        print(f"{rows:4d} rows, choice with a gate read {step} at a time {took:8.1f} us")
        results.append({"rows": rows, "gate_step": step, "choice_us": took})
    return results
