"""Tokens per second of the engine on a GPU, by requests at once and drafts; no other engine.

PYTHONPATH=. python3 benchmarks/gpu_engine.py MODEL [--requests 1,4,16,80] [--speculate 0,3]
    [--weights as-dtype,fp8] [--seconds 100]

MODEL is a calibrated checkpoint. Every answer is compared with the cycle that its trunk walks: with
weights as they are all of it must be the same, of others the share that is. Prints tokens per
second with prefill included, time to first token, and acceptance, as it goes; with several formats
of weights also what each is to the first. Nothing is begun after --seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from device_profile import list_kernels

from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams


def prompts(count: int, length: int, tokens: range, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(tokens, k=length) for _ in range(count)]


def measure(
    engine: Engine, given: argparse.Namespace, count: int, seed: int, *, answer: int | None = None
) -> dict[str, Any]:
    """`count` requests at once, each with `answer` tokens, or as many as the options say."""
    answer = answer or given.answer
    following = given.following
    asked = prompts(count, given.prompt, range(2, len(following)), seed)
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    started = time.perf_counter()
    results = engine.generate(asked, params)
    seconds = time.perf_counter() - started
    same = 0
    for prompt, result in zip(asked, results, strict=True):
        token = prompt[-1]
        for chosen in result.outputs[0].token_ids:
            same += chosen == following[token]
            token = chosen
    share = same / (count * answer)
    assert share == 1 or engine.options.weights != "as-dtype", "the text is not the cycle's"
    first = sorted(result.stats.first_token_seconds or 0.0 for result in results)
    acceptance = results[0].stats.acceptance
    return {
        "requests": count, "tokens_per_second": round(count * answer / seconds, 1),
        "first_token_seconds": round(first[len(first) // 2], 4),
        "acceptance_length": round(acceptance.length, 3), "as_the_cycle": round(share, 5),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,4,16,80")
    parser.add_argument("--speculate", default="0,3")
    parser.add_argument("--weights", default="as-dtype", help="one or more, by commas")
    parser.add_argument("--prompt", type=int, default=2500)
    parser.add_argument("--answer", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    given.following = agreement_of(Path(given.model)).following.tolist()
    given.stop = time.monotonic() + given.seconds
    formats = given.weights.split(",")
    for drafts in (int(n) for n in given.speculate.split(",")):
        best = {weights: speeds(given, weights, drafts) for weights in formats}
        for weights in formats[1:]:
            ratios = {
                count: round(speed / best[formats[0]][count], 3)
                for count, speed in best[weights].items() if count in best[formats[0]]
            }  # fmt: skip
            words = f"{weights} to {formats[0]}, by requests at once"
            print(f"K = {drafts}: {words}: {ratios}", flush=True)


def speeds(given: argparse.Namespace, weights: Any, drafts: int) -> dict[int, float]:
    """Most tokens per second of an engine, by requests at once."""
    best: dict[int, float] = {}
    counts = [int(n) for n in given.requests.split(",")]
    started = time.perf_counter()
    engine = Engine(
        given.model, speculate=drafts, max_running_requests=max(counts), prefix_caching=False,
        max_model_len=given.prompt + given.answer + 64, weights=weights,
    )  # fmt: skip
    print(
        f"K = {drafts}: started in {time.perf_counter() - started:.1f} s", engine.notes, flush=True
    )
    for count in counts:
        if time.monotonic() > given.stop:
            print("out of time", flush=True)
            break
        measure(engine, given, count, seed=99, answer=40)
        for repeat in range(given.repeats):
            row = measure(engine, given, count, repeat)
            best[count] = max(best.get(count, 0), row["tokens_per_second"])
            print(json.dumps({"speculate": drafts, "weights": weights, **row}), flush=True)
    if given.profile:  # where a prefill's time goes on the device
        list_kernels(partial(measure, engine, given, 4, seed=5, answer=2))
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return best


if __name__ == "__main__":
    main()
