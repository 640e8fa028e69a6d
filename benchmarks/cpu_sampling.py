"""Every sampling setting against plain greedy decoding on a CPU, in one run.

python benchmarks/cpu_sampling.py --work DIR [--tokens 32] [--repeats 9] [--out FILE]
                                  [--weights int8 fp32] [--drafts 0 3] [--requests 1 4]

Makes a calibrated checkpoint of SmolLM2-135M's shape (rate 0.8). Settings take turns with greedy in
short runs, so that a busy moment hits both: the figure of a setting is the median over turns of its
tokens per second over the mean of greedy's just before and just after. Tokens behind the first one
count. With drafts the temperature is so low that the text, and so the acceptance, is greedy's;
without drafts, where acceptance is no matter, it is 0.8, which leaves more of the noise to be
computed. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from headstart.backends.options import Weights
from headstart.calibrate.calibrated import write_calibrated
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

SHAPE, RATE, VOCAB = "smollm2-135m", 0.8, 49152
FORMATS: dict[str, Weights] = {"int8": "int8", "fp32": "as-dtype"}
GREEDY = "greedy"


class Anything:
    """A grammar that allows all tokens: what masks cost, and no parser."""

    def __init__(self) -> None:
        self._mask = torch.ones(VOCAB, dtype=torch.bool)

    def allowed(self) -> torch.Tensor:
        return self._mask

    def accept(self, token: int) -> bool:
        return True

    def fork(self) -> Anything:
        return self


def settings(temperature: float, tokens: int) -> dict[str, dict[str, Any]]:
    drawn = {"temperature": temperature}
    penalties = {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    lists = {
        "logit_bias": {token: -1.0 for token in range(100)},
        "allowed_token_ids": tuple(range(1, VOCAB)),
        "banned_token_ids": tuple(range(100, 110)),
    }
    cut = {"top_k": 50, "top_p": 0.95, "min_p": 0.01}
    return {
        GREEDY: {},
        "temperature": drawn,
        "top-p 0.95": {**drawn, "top_p": 0.95},
        "top-k 50": {**drawn, "top_k": 50},
        "top-k, top-p, min-p": {**drawn, **cut},
        "min-p 0.05": {**drawn, "min_p": 0.05},
        "repetition penalty": {"repetition_penalty": 1.05},
        "presence and frequency": {"presence_penalty": 0.1, "frequency_penalty": 0.1},
        "logit bias, 100 tokens": {"logit_bias": lists["logit_bias"]},
        "allowed, all but one": {"allowed_token_ids": lists["allowed_token_ids"]},
        "banned, 10 tokens": {"banned_token_ids": lists["banned_token_ids"]},
        "min_tokens": {"min_tokens": tokens, "stop_token_ids": (5,)},
        "log-probabilities": {"logprobs": 0},
        "log-probabilities, top 5": {"logprobs": 5},
        "log-probabilities, top 20": {"logprobs": 20},
        "stop strings": {"stop": ("never", "nor this")},
        "processed, top 5": {**drawn, **cut, "logprobs": 5, "logprobs_mode": "processed"},
        "rejection rule": {**drawn, "acceptance": "rejection"},
        "grammar": {"grammar": Anything()},
        "all together": {**drawn, **cut, **penalties, **lists, "min_tokens": tokens, "logprobs": 5},
    }


class Contender:
    """One engine with so many requests."""

    def __init__(self, engine: Engine, requests: int, tokens: int):
        self._engine, self._tokens = engine, tokens
        self._prompts = [list(range(200 + 50 * i, 232 + 50 * i)) for i in range(requests)]

    def run(self, fields: dict[str, Any]) -> tuple[float, float]:
        """Tokens per second, and the acceptance length."""
        fields = dict(fields)
        grammar = fields.pop("grammar", None)
        params = SamplingParams(
            **{
                "temperature": 0,
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "seed": 1,
                **fields,
            }
        )
        results = self._engine.generate(self._prompts, params, grammar=grammar)
        stats = [result.stats for result in results]
        begun = max(each.first_token_seconds or 0.0 for each in stats)
        seconds = max(each.total_seconds or 0.0 for each in stats) - begun
        made = sum(len(result.outputs[0].token_ids) - 1 for result in results)
        return made / seconds, statistics.mean(each.acceptance.length for each in stats)


def measure(contender: Contender, asked: dict[str, dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Of each setting: median tokens/s, ratios to greedy nearby, acceptance length."""
    speeds: dict[str, list[float]] = {name: [] for name in asked}
    ratios: dict[str, list[float]] = {name: [] for name in asked}
    lengths: dict[str, float] = {}
    for fields in asked.values():
        contender.run(fields)  # lists are converted, memory is touched
    before, _ = contender.run(asked[GREEDY])
    for _ in range(repeats):
        for name, fields in asked.items():  # greedy itself among them: how much is noise
            speed, lengths[name] = contender.run(fields)
            after, _ = contender.run(asked[GREEDY])
            speeds[name].append(speed)
            ratios[name].append(2 * speed / (before + after))
            before = after
    return {name: _summary(speeds[name], ratios[name], lengths[name]) for name in asked}


def _summary(speeds: list[float], ratios: list[float], length: float) -> dict[str, Any]:
    ordered = sorted(ratios)
    return {
        "tokens_per_second": round(statistics.median(speeds), 1),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(ordered[len(ordered) * i // 4], 3) for i in (1, 3)],
        "length": round(length, 3),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--only", nargs="+", help="names of settings, besides greedy")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.work / f"{SHAPE}-calibrated"
    if not folder.exists():
        write_calibrated(SHAPE, RATE, folder, dtype="F32")
    result: dict[str, Any] = {
        "shape": SHAPE, "rate": RATE, "tokens": arguments.tokens, "repeats": arguments.repeats,
        "threads": arguments.threads, "processor": processor(), "torch": torch.__version__,
        "numba": numba.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "runs": [],
    }  # fmt: skip
    for kind in arguments.weights:
        for drafts in arguments.drafts:
            engine = Engine(
                folder, device="cpu", speculate=drafts, weights=FORMATS[kind],
                threads=arguments.threads, max_model_len=2048, kv_bytes=1 << 28,
                prefix_caching=False,
            )  # fmt: skip
            asked = settings(0.05 if drafts else 0.8, arguments.tokens)
            if arguments.only:
                asked = {name: asked[name] for name in (GREEDY, *arguments.only)}
            for requests in arguments.requests:
                found = measure(
                    Contender(engine, requests, arguments.tokens), asked, arguments.repeats
                )
                result["runs"].append(
                    {"weights": kind, "K": drafts, "requests": requests, "settings": found}
                )
                print(f"\n{kind}, K = {drafts}, {requests} requests")
                for name, own in found.items():
                    print(
                        f"  {name:26} {own['tokens_per_second']:7.1f} tokens/s {own['ratio']:6.3f} "
                        f"{own['quartiles']}  length {own['length']:.2f}", flush=True,
                    )  # fmt: skip
            del engine
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
