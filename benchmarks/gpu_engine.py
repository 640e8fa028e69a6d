"""Tokens per second of the engine on a GPU, by requests at once and drafts; no other engine.

PYTHONPATH=. python3 benchmarks/gpu_engine.py MODEL [--requests 1,4,16,80] [--speculate 0,3]
    [--weights fp8]

MODEL is a calibrated checkpoint. Every answer is checked against the cycle that its trunk walks.
Prints tokens per second with prefill included, time to first token, and acceptance.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams


def prompts(count: int, length: int, tokens: range, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(tokens, k=length) for _ in range(count)]


def measure(engine: Engine, given: argparse.Namespace, count: int, seed: int) -> dict[str, Any]:
    following = given.following
    asked = prompts(count, given.prompt, range(2, len(following)), seed)
    params = SamplingParams(temperature=0, max_tokens=given.answer, ignore_eos=True)
    started = time.perf_counter()
    results = engine.generate(asked, params)
    seconds = time.perf_counter() - started
    for prompt, result in zip(asked, results, strict=True):
        token = prompt[-1]
        for chosen in result.outputs[0].token_ids:
            token = following[token]
            assert chosen == token, "the text is not the cycle's"
    first = sorted(result.stats.first_token_seconds or 0.0 for result in results)
    acceptance = results[0].stats.acceptance
    return {
        "requests": count, "tokens_per_second": round(count * given.answer / seconds, 1),
        "first_token_seconds": round(first[len(first) // 2], 4),
        "acceptance_length": round(acceptance.length, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,4,16,80")
    parser.add_argument("--speculate", default="0,3")
    parser.add_argument("--weights", default="as-dtype")
    parser.add_argument("--prompt", type=int, default=2500)
    parser.add_argument("--answer", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    given.following = agreement_of(Path(given.model)).following.tolist()
    counts = [int(n) for n in given.requests.split(",")]
    for drafts in (int(n) for n in given.speculate.split(",")):
        started = time.perf_counter()
        engine = Engine(
            given.model, speculate=drafts, max_running_requests=max(counts), prefix_caching=False,
            max_model_len=given.prompt + given.answer + 64, weights=given.weights,
        )  # fmt: skip
        print(f"K = {drafts}: started in {time.perf_counter() - started:.1f} s", engine.notes)
        for count in counts:
            measure(engine, argparse.Namespace(**{**vars(given), "answer": 40}), count, seed=99)
            for repeat in range(given.repeats):
                row = measure(engine, given, count, repeat)
                kind = {"speculate": drafts, "weights": given.weights}
                print(json.dumps({**kind, **row}), flush=True)
        if given.profile:
            profile(engine, given)
        del engine
        torch.cuda.empty_cache()


def profile(engine: Engine, given: argparse.Namespace) -> None:
    """Where a prefill's time goes on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        measure(engine, argparse.Namespace(**{**vars(given), "answer": 2}), 4, seed=5)
    for event in sorted(recorded.key_averages(), key=lambda e: -e.self_device_time_total)[:14]:
        total = event.self_device_time_total / 1e3
        print(f"  {total:8.2f} ms {event.count:6d} x  {event.key[:70]}")


if __name__ == "__main__":
    main()
