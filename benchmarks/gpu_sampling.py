"""Every sampling setting against plain greedy decoding on a GPU, in one run.

PYTHONPATH=. python3 benchmarks/gpu_sampling.py MODEL [--requests 1,8,32,128] [--speculate 3]
    [--prompt 450] [--answer 256] [--turns 3] [--out FILE]

MODEL is a calibrated checkpoint. Settings take turns; the figure of a setting is the median over
turns of its tokens per second over greedy's in the same turn. The temperature is so low that texts,
and so acceptance, are greedy's; acceptance is shown. A row says how many rounds ran on the device
by themselves, and why others did not. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import triton

from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

GREEDY = "greedy"


def settings(vocab: int) -> dict[str, dict[str, Any]]:
    drawn = {"temperature": 0.1}
    cut = {"top_k": 20, "top_p": 0.95, "min_p": 0.01}
    penalties = {"repetition_penalty": 1.02, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    lists = {"logit_bias": {token: -1.0 for token in range(20)}, "banned_token_ids": (0, 1)}
    return {
        GREEDY: {},
        "temperature": drawn,
        "top-p 0.95": {**drawn, "top_p": 0.95},
        "top-k 20, top-p 0.95": {**drawn, "top_k": 20, "top_p": 0.95},
        "top-k 200": {**drawn, "top_k": 200},
        "top-k, top-p, min-p": {**drawn, **cut},
        "frequency penalty": {"frequency_penalty": 0.1},
        "all penalties": penalties,
        "bias and banned": lists,
        "allowed": {"allowed_token_ids": tuple(range(2, vocab))},
        "min_tokens": {"min_tokens": 10_000, "max_tokens": 10_000, "stop_token_ids": (1,)},
        "log-probabilities": {"logprobs": 0},
        "log-probabilities, top 20": {"logprobs": 20},
        "processed, top 5": {**drawn, **cut, "logprobs": 5, "logprobs_mode": "processed"},
        "rejection rule": {**drawn, "acceptance": "rejection"},
        "all together": {**drawn, **cut, **penalties, **lists, "logprobs": 5},
    }


class Rig:
    """One engine, asked the same prompts with every setting of a turn."""

    def __init__(self, engine: Engine, given: argparse.Namespace, tokens: range):
        self._engine, self._given, self._tokens = engine, given, tokens

    def run(self, fields: dict[str, Any], count: int, seed: int, answer: int) -> dict[str, float]:
        draw = random.Random(seed)
        prompts = [draw.choices(self._tokens, k=self._given.prompt) for _ in range(count)]
        asked = {"temperature": 0, "ignore_eos": True, "seed": 1, **fields, "max_tokens": answer}
        if "min_tokens" in asked:
            asked["min_tokens"] = answer
        started = time.perf_counter()
        results = self._engine.generate(prompts, SamplingParams(**asked))
        seconds = time.perf_counter() - started
        first = statistics.median(r.stats.first_token_seconds or 0.0 for r in results)
        return {
            "tokens_per_second": count * answer / seconds,
            "acceptance_length": statistics.fmean(r.stats.acceptance.length for r in results),
            "first_token_ms": 1e3 * first,
        }


def measure(rig: Rig, given: argparse.Namespace, count: int, asked: dict[str, Any]) -> list[Any]:
    for fields in asked.values():
        rig.run(fields, count, 99, 32)
    turns: list[dict[str, dict[str, float]]] = []
    for turn in range(given.turns):
        turns.append({name: rig.run(f, count, turn, given.answer) for name, f in asked.items()})
    rows = []
    for name in asked:
        own = [turn[name] for turn in turns]
        ratios = [
            turn[name]["tokens_per_second"] / turn[GREEDY]["tokens_per_second"] for turn in turns
        ]
        middle = {key: round(statistics.median(o[key] for o in own), 3) for key in own[0]}
        row = {"requests": count, "setting": name, **middle}
        rows.append({**row, "of_greedy": round(statistics.median(ratios), 3)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,8,32,128")
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=450)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", help="settings, by semicolon")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    following = agreement_of(Path(given.model)).following.tolist()
    counts = [int(n) for n in given.requests.split(",")]
    started = time.perf_counter()
    engine = Engine(
        given.model, speculate=given.speculate, max_running_requests=max(counts),
        prefix_caching=False, max_model_len=given.prompt + given.answer + 64,
    )  # fmt: skip
    print(f"started in {time.perf_counter() - started:.1f} s", engine.notes, flush=True)
    asked = settings(engine.model.config.vocab)
    if given.only:
        asked = {name: asked[name] for name in (GREEDY, *given.only.split(";"))}
    rig = Rig(engine, given, range(2, len(following)))
    document: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "model": given.model, "speculate": given.speculate,
        "prompt": given.prompt, "answer": given.answer, "rows": [],
    }  # fmt: skip
    for count in counts:
        document["rows"] += measure(rig, given, count, asked)
        if given.out:
            given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
