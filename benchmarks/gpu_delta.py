"""How close a round of a gated delta net comes to the time that its bytes take.

PYTHONPATH=. python3 benchmarks/gpu_delta.py [--requests 1,4,16,64] [--rows 1,4]

A layer of Qwen3-Next's size. The floor is its weights and the memories of all requests, read and
written once, over the speed at which this GPU copies memory. Rows are checked against the plain
module first. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from graph_timing import copy_speed, seconds
from torch import Tensor

from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.recurrent import RecurrentBatch, round_recur
from headstart.models.delta_config import DeltaConfig
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, empty_states

HIDDEN = 2048
CONFIG = DeltaConfig(k_heads=16, v_heads=32, k_dim=128, v_dim=128, kernel=4)
DEVICE = torch.device("cuda")
READ = 8  # rows of every request before the first round
LAYERS = 6  # with states of their own, so that the cache does not hold the next one's


@dataclass(frozen=True)
class Rig:
    net: DeltaNet
    states: list[LayerStates]
    batch: RecurrentBatch
    first: Tensor


def make_net() -> DeltaNet:
    with torch.device(DEVICE):
        net = DeltaNet(HIDDEN, CONFIG, 1e-6)
    for value in net.parameters():
        value.data.normal_(0, HIDDEN**-0.5)
    return net.bfloat16()


def admit(net: DeltaNet, texts: Tensor, rows: int, layers: int) -> Rig:
    """Texts [requests, READ, hidden], read by the plain module."""
    count = texts.shape[0]
    states = [empty_states(CONFIG, count, torch.bfloat16, DEVICE) for _ in range(layers)]
    batch = RecurrentBatch.create(CONFIG, layers, count, rows - 1, torch.bfloat16, DEVICE)
    spans = [StateSpan(i * READ, (i + 1) * READ, None, ((READ, i),)) for i in range(count)]
    for own in states:
        net(texts.flatten(0, 1), None, SlotRecurrence(own, spans))
    for at in range(count):
        batch.admit(at, at, at, READ, states)
    first = torch.full((count,), READ, dtype=torch.int32, device=DEVICE)
    return Rig(net, states, batch, first)


def check(net: DeltaNet, count: int, rows: int) -> float:
    """Two rounds of which the first is accepted in part, against the plain module."""
    texts = torch.randn(count, READ + 2 * rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    rig, kept = admit(net, texts[:, :READ], rows, 1), max(1, rows - 1)
    for start, replays in ((READ, 0), (READ + kept, kept)):
        rig.batch.replays.fill_(replays)
        recur = round_recur(
            Kernels(), rig.batch, rig.states, rig.first.new_full((count,), start), rows
        )
        found = recur(net, 0, texts[:, start : start + rows].reshape(-1, HIDDEN).contiguous()).sum(
            0
        )
    spans = [StateSpan(i * (start + rows), (i + 1) * (start + rows), None,
                       ((start + rows, i),)) for i in range(count)]  # fmt: skip
    fresh = empty_states(CONFIG, count, torch.bfloat16, DEVICE)
    whole = texts[:, : start + rows].reshape(-1, HIDDEN)
    wanted = net(whole, None, SlotRecurrence(fresh, spans)).view(count, -1, HIDDEN)[:, -rows:]
    found = found.view(count, rows, HIDDEN).float()
    worst = float((found - wanted.float()).abs().max() / wanted.float().abs().max())
    if not worst < 0.05:
        raise SystemExit(
            f"{count} requests of {rows} rows differ from the plain module by {worst:.3f}"
        )
    return worst


def measure(net: DeltaNet, count: int, rows: int, speed: float) -> dict[str, Any]:
    texts = torch.randn(count, READ, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    rig = admit(net, texts, rows, LAYERS)
    rig.batch.replays.fill_(1)
    x = torch.randn(count * rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    recur = round_recur(Kernels(), rig.batch, rig.states, rig.first, rows)
    took = seconds([partial(recur, net, layer, x) for layer in range(LAYERS)])
    weights = sum(value.numel() * value.element_size() for value in net.parameters())
    memories = 2 * count * CONFIG.memory_values * 4
    floor = (weights + memories) / speed
    return {"requests": count, "rows": rows, "us": took * 1e6, "floor_us": floor * 1e6,
            "times_floor": took / floor}  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="1,4,16,64")
    parser.add_argument("--rows", default="1,4")
    given = parser.parse_args()
    torch.manual_seed(0)
    net, results = make_net(), []
    speed = copy_speed()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(
        f"a copy moves {speed / 1e12:.2f} TB/s\nrequests rows       us    floor  times  difference"
    )
    for count in (int(n) for n in given.requests.split(",")):
        for rows in (int(n) for n in given.rows.split(",")):
            worst = check(net, count, rows)
            found = measure(net, count, rows, speed)
            results.append(found)
            line = "{requests:8d} {rows:4d} {us:8.1f} {floor_us:8.1f} {times_floor:6.2f}"
            print(line.format(**found), f"{worst:10.4f}", flush=True)
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                "copy_bytes_per_second": speed, "rounds": results}  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
