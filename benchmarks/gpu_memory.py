"""What an engine with default options takes of a GPU: planned, after the start, and under load.

PYTHONPATH=. python3 benchmarks/gpu_memory.py MODEL [--requests 300] [--answer 64]

MODEL is a calibrated checkpoint. All settings of sampling take part, many requests at once; fails
if memory runs out. Prints the engine's notes and one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch

from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

_KINDS = (
    {"temperature": 0}, {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "logprobs": 5},
    {"temperature": 0, "frequency_penalty": 0.1}, {"temperature": 0.5, "acceptance": "rejection"},
)  # fmt: skip


def used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--answer", type=int, default=64)
    given = parser.parse_args()
    found = {"total_gb": round(torch.cuda.mem_get_info()[1] / 1e9, 2), "before_gb": used_gb()}
    began = time.perf_counter()
    engine = Engine(given.model)
    found |= {"start_seconds": round(time.perf_counter() - began, 1), "started_gb": used_gb()}
    draw = random.Random(0)
    prompts = [draw.choices(range(2, 20000), k=400) for _ in range(given.requests)]
    params = [
        SamplingParams(
            **_KINDS[i % len(_KINDS)],
            max_tokens=given.answer,
            ignore_eos=True,
            seed=i,
            detokenize=False,
        )
        for i in range(given.requests)
    ]
    began = time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    found |= {"loaded_gb": used_gb(), "seconds": round(seconds, 1)}
    print(*engine.notes, sep="\n")
    print(json.dumps({**found, "slow_rounds": engine.stats.slow_rounds}))


if __name__ == "__main__":
    main()
