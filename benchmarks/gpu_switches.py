"""What single decisions of the cuda backend bring: one engine after the other, in turns.

PYTHONPATH=. python3 benchmarks/gpu_switches.py MODEL [--requests 16] [--repeats 3] [--seconds 120]
    [--switches none,integers,whole,integers+whole] [--profile] [--out FILE]

MODEL is a calibrated checkpoint, such as `gpu_quantized_vs_vllm.py --make-only` writes.
`integers`: products of 4-bit weights with 17 to 128 rows by pairs of integers, not by
`kernels/wide_groups.py`; `whole`: contexts of 9 to 16 requests in pieces of 1024 tokens at
least; `none`: as the engine decides. Every answer is checked against the cycle that the trunk
walks. With --profile the kernels of a short run are listed, too. Nothing is begun after --seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from device_profile import list_kernels
from gpu_engine import measure

from headstart.backends.cuda import attending, group_linear
from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine

_cut_for = attending.cut_for
_LISTED = 16  # kernels
_WHOLE = Cut(pieces=8, least=1024, step=64, warps=4, stages=3)


def cut_whole(requests: int, rows: int) -> Cut:
    is_own = 8 < requests <= 16 and rows < attending.GROUP_ROWS
    return _WHOLE if is_own else _cut_for(requests, rows)


@contextmanager
def switched(names: list[str]) -> Iterator[None]:
    """Engines that start meanwhile decide so."""
    with ExitStack() as stack:
        for name in names:
            if name == "whole":
                stack.enter_context(patch.object(attending, "cut_for", cut_whole))
            elif name == "integers":
                stack.enter_context(patch.object(group_linear, "takes_wide", return_value=False))
            elif name != "none":
                raise SystemExit(f"--switches: {name} is none of integers, whole, none")
        yield


def run(given: argparse.Namespace, switches: str) -> list[dict[str, Any]]:
    began = time.perf_counter()
    engine = Engine(
        given.model, speculate=3, max_running_requests=max(given.requests), prefix_caching=False,
        max_model_len=given.prompt + given.answer + 64,
    )  # fmt: skip
    print(f"{switches}: started in {time.perf_counter() - began:.1f} s", flush=True)
    found = []
    for count in given.requests:
        measure(engine, given, count, seed=99, answer=40)
        rows = [measure(engine, given, count, seed) for seed in range(given.repeats)]
        speeds = [row["tokens_per_second"] for row in rows]
        row = {**rows[0], "switches": switches, "each": speeds,
               "tokens_per_second": statistics.median(speeds)}  # fmt: skip
        print(json.dumps(row), flush=True)
        found.append(row)
    if given.profile and torch.cuda.is_available():
        most = max(given.requests)
        list_kernels(partial(measure, engine, given, most, seed=5, answer=60), _LISTED)
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", default="16")
    parser.add_argument("--switches", default="none,integers,whole,integers+whole")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--profile", action="store_true", help="list kernels of a short run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.requests = [int(count) for count in given.requests.split(",")]
    given.following = agreement_of(Path(given.model)).following.tolist()
    began, results = time.monotonic(), []
    for switches in given.switches.split(","):
        if time.monotonic() - began > given.seconds:
            print(f"out of time before {switches}", flush=True)
            break
        with switched(switches.split("+")):
            results += run(given, switches)
        if given.out:
            given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
