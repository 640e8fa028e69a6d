"""What a round of the GPU path costs, against the bytes it must read.

PYTHONPATH=. python3 benchmarks/gpu_round.py [--shape mimo-7b] [--requests 1,4,16,80] [--drafts 0,3]

Random weights: a round costs the same whatever the text. Prints milliseconds per round (median
of graph replays), the floor by bytes at the bandwidth a copy reaches here, and with --profile
the time by kernel.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from device_profile import kernel_events
from graph_timing import copy_speed, timed
from random_models import random_model

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.round_model import DraftTokens, RoundModel
from headstart.backends.cuda.shapes import RoundShape
from headstart.backends.rounds import RoundRequest
from headstart.calibrate.shape_config import shape_config
from headstart.models.attention import LayerCache
from headstart.models.config_reader import model_config
from headstart.sampling.params import Row, SamplingParams

DEVICE = torch.device("cuda")
PAGE = 16


def round_model(config: Any, slots: int, max_context: int, draft_rows: int) -> RoundModel:
    trunk, head = random_model(config, DEVICE, torch.bfloat16, max_context)
    shape = (slots, config.num_kv_heads, config.head_dim)

    def cache() -> LayerCache:
        return LayerCache(*(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"))

    lm_head, ids = trunk.lm_head, None
    if draft_rows:
        ids = torch.arange(draft_rows, device=DEVICE)
        lm_head = lm_head.only_rows(ids)
    return RoundModel(
        trunk, head, [cache() for _ in range(config.num_layers)], [cache()],
        torch.zeros(slots // PAGE, 1, config.hidden, device=DEVICE, dtype=torch.bfloat16), PAGE,
        [DraftTokens((lm_head,), ids)], max_context,
        feeds_stream=False,
    )  # fmt: skip


def fill(batch: DecodeBatch, count: int, drafts: int, context: int, config: Any) -> None:
    each = -(-(context + 1024) // PAGE)
    for at in range(count):
        blocks = range(at * each, (at + 1) * each)
        states = torch.randn(1, config.hidden, device=DEVICE, dtype=torch.bfloat16)
        request = RoundRequest(
            num_tokens=context, remaining=10**6, newest=torch.tensor(5, device=DEVICE),
            states=states, row=Row(SamplingParams(temperature=0), 1, context), blocks=blocks,
        )  # fmt: skip
        batch.admit(at, request)
    batch.limit([drafts] * count)


def floor_bytes(model: RoundModel, count: int, drafts: int, context: int) -> int:
    trunk = model.trunk
    weights = sum(p.numel() for n, p in trunk.named_parameters() if n != "embed")
    assert model.head is not None
    head = sum(p.numel() for p in model.head.parameters())
    head += model.drafting[0].lm_head(1).weight.numel()
    entry = 2 * trunk.config.num_kv_heads * trunk.config.head_dim
    kv = count * context * entry * (trunk.config.num_layers + drafts)
    return int(2 * (weights + drafts * head + kv))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="mimo-7b")
    parser.add_argument("--requests", default="1,4,16,80")
    parser.add_argument("--drafts", default="0,3")
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument("--draft-rows", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    counts = [int(n) for n in given.requests.split(",")]
    config = model_config(shape_config(given.shape))
    max_context = -(-(given.context + 1024) // PAGE) * PAGE
    model = round_model(config, max(counts) * max_context, max_context, given.draft_rows)
    bandwidth = copy_speed()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    with torch.inference_mode():
        for drafts in (int(n) for n in given.drafts.split(",")):
            for count in counts:
                batch = DecodeBatch(
                    max(counts), max_drafts=drafts, window=16, max_blocks=max_context // PAGE,
                    hidden=config.hidden, vocab=config.vocab, dtype=torch.bfloat16, device=DEVICE,
                )  # fmt: skip
                fill(batch, count, drafts, given.context, config)
                graphs = Graphs(model if drafts else replace(model, head=None), batch)
                shape = RoundShape.usual(count, drafts)
                seconds = timed(partial(graphs.run, shape), 20)
                floor = floor_bytes(model, count, drafts, given.context) / bandwidth
                row = {"requests": count, "drafts": drafts, "ms": round(seconds * 1e3, 3)}
                row |= {"floor_ms": round(floor * 1e3, 3), "ratio": round(seconds / floor, 3)}
                print(json.dumps(row), flush=True)
                if given.profile:
                    profile(graphs, count, drafts)


def profile(graphs: Graphs, count: int, drafts: int) -> None:
    """Where the time of a round goes on the device."""

    def rounds() -> None:
        for _ in range(3):
            graphs.run(RoundShape.usual(count, drafts))
        torch.cuda.synchronize()

    for event in kernel_events(rounds)[:14]:
        each = event.self_device_time_total / event.count
        total = event.self_device_time_total / 3e3
        print(f"  {total:8.3f} ms {event.count // 3:5d} x {each:7.1f} us  {event.key[:64]}")


if __name__ == "__main__":
    main()
