"""What rounds with copied drafts take a GPU: each part by its shape, and a play's kernels.

PYTHONPATH=. python3 benchmarks/gpu_copy_rounds.py MODEL [--requests 64] [--few-rows 4,17]

MODEL, prompts and plays are those of benchmarks/gpu_copies.py, half of the text copied. After plays
that warm up and capture, one play's parts (drafts, trunk, choice) stand between the device's own
events; then the profiler sums kernels over another one, by `auto` and by the head alone.
`--few-rows`: in turns, up to how many rows requests attend in programs for few; 17: all together.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from device_profile import kernel_events
from gpu_copies import SIDES, become, play

from headstart.backends.cuda import rounds as cuda_rounds
from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.kernels import squeezed
from headstart.calibrate.calibrated import agreement_of
from headstart.calibrate.copy_prompts import CopyPlan, copy_prompts
from headstart.engine.engine import Engine

_WARM = 3  # plays of each side
_SHOWN = 14


def timed_parts(run: Any) -> dict[str, tuple[int, float]]:
    """How often each captured part ran while `run` did, and its median in milliseconds."""
    marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    run_part = Graphs.run_part

    def watched(graphs: Graphs, part: Any) -> None:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run_part(graphs, part)
        ended.record()
        marks[str(part)].append((began, ended))

    with patch.object(Graphs, "run_part", watched):
        run()
    torch.cuda.synchronize()
    return {
        name: (len(own), median(began.elapsed_time(ended) for began, ended in own))
        for name, own in marks.items()
    }


def use_few_rows(engine: Engine, few: int) -> None:
    """Attend so from now on: what was captured is captured again."""
    for module in (squeezed, cuda_rounds):
        patch.object(module, "FEW_ROWS", few).start()
    device: Any = engine.loop.rounds and engine.loop.rounds._device
    device.graphs._graphs.clear()
    device.graphs._runs = Counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.45)
    parser.add_argument("--few-rows", default="4,17")
    given = parser.parse_args()
    engine = Engine(
        given.model, speculate="auto", max_running_requests=given.requests, max_model_len=2048,
        prefix_caching=False,
    )  # fmt: skip
    become(engine, given.model, given.rate)
    plan = CopyPlan(length=64, share=0.5, prompts=8 * given.requests, answer_tokens=512)
    prompts = list(copy_prompts(agreement_of(given.model), plan, seed=0))
    batches = [prompts[at : at + given.requests] for at in range(0, len(prompts), given.requests)]
    for few in map(int, given.few_rows.split(",")):
        use_few_rows(engine, few)
        for batch in batches[:_WARM]:
            for side in SIDES:
                play(engine, batch, side, 512)
        for side in SIDES:
            for batch in batches[_WARM : _WARM + 3]:
                found = play(engine, batch, side, 512)
                print(json.dumps({"few_rows": few, "side": side, **found}), flush=True)
        for side in SIDES:
            parts = timed_parts(partial(play, engine, batches[-2], side, 512))
            for name, (count, middle) in sorted(parts.items(), key=lambda e: -e[1][0] * e[1][1]):
                if count * middle > 10:
                    print(f"{few} {side} {count:5d} x {middle:7.3f} ms  {name}", flush=True)
            events = kernel_events(partial(play, engine, batches[-1], side, 512))
            for event in events[:_SHOWN]:
                total = event.self_device_time_total / 1e3
                print(f"{few} {side} {total:9.1f} ms {event.count:6d} x {event.key[:60]}")


if __name__ == "__main__":
    main()
