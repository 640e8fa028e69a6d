"""What tokens of their own text beside a 32k draft vocabulary cost requests on a GPU, and bring.

PYTHONPATH=. python3 benchmarks/gpu_own_tokens.py MODEL [--requests 1,16,64] [--own 512]
    [--list 32000] [--missing 0.05] [--seconds 70] [--json FILE]

MODEL is a calibrated checkpoint (`headstart calibrate --shape mimo-7b --acceptance 0.8 --active
32000`). Two engines in one process, in turns: the list alone, and the list with own tokens; the
first also drafts from the whole vocabulary. Three kinds of prompts, equally long:

    inside   nothing of prompt or answer is outside the list: what the feature costs for nothing
    useless  256 tokens of the prompt are outside the list, and the answer has none of them
    missing  a share of the answer is outside the list, and the prompt has those tokens

Answers are compared with the cycle that the trunk walks. Ratios are medians of those turns, to the
list alone. Nothing is begun after --seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

KINDS = ("inside", "useless", "missing")
_USELESS = 256  # tokens


class Texts:
    """A list that lacks a share of one half of the cycle, and prompts of each kind."""

    def __init__(self, following: list[int], given: argparse.Namespace):
        self.following, self._given = following, given
        draw = random.Random(1)
        first = 2
        for _ in following:  # from any token the trunk comes to the cycle
            first = following[first]
        cycle = [first]
        while (token := following[cycle[-1]]) != first:
            cycle.append(token)
        half = len(cycle) // 2
        missing = set(draw.sample(cycle[half:], int(given.missing * half)))
        known = {token for token in cycle if token not in missing}
        # Tokens that are not on the cycle fill the list up.
        others = (t for t in range(2, len(following)) if t not in known and t not in missing)
        while len(known) < given.list:
            known.add(next(others))
        self.listed = sorted(known)
        self._known = known
        walked = max(1, half - given.answer)
        self._starts = {
            "missing": [t for t in cycle[half : half + walked] if t in known],
            **dict.fromkeys(("inside", "useless"), cycle[:walked]),
        }
        self._inside = [token for token in cycle if token in known]
        self._outside = [t for t in range(2, len(following)) if t not in known]

    def walk(self, start: int) -> list[int]:
        text, token = [], start
        for _ in range(self._given.answer):
            token = self.following[token]
            text.append(token)
        return text

    def prompt(self, kind: str, draw: random.Random) -> list[int]:
        start = draw.choice(self._starts[kind])
        text = draw.choices(self._inside, k=self._given.prompt - 1)
        if kind == "useless":
            text[:_USELESS] = draw.sample(self._outside, min(_USELESS, len(self._outside)))
        if kind == "missing":
            lacking = [token for token in self.walk(start) if token not in self._known]
            text[: len(lacking)] = lacking
        return [*text[-self._given.prompt + 1 :], start]


def measure(
    engine: Engine, texts: Texts, kind: str, count: int, seed: int, answer: int, vocab: str | None
) -> dict[str, Any]:
    draw = random.Random(f"{kind} {count} {seed}")
    asked = [texts.prompt(kind, draw) for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, draft_vocab=vocab)
    started = time.perf_counter()
    results = engine.generate(asked, params)
    seconds = time.perf_counter() - started
    for prompt, result in zip(asked, results, strict=True):
        assert result.outputs[0].token_ids == texts.walk(prompt[-1])[:answer], "not the cycle's"
    rounds = sum(result.stats.acceptance.rounds for result in results)
    return {
        "tokens_per_second": count * answer / seconds,
        "acceptance_length": count * answer / max(1, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,16,64")
    parser.add_argument("--own", type=int, default=512)
    parser.add_argument("--list", type=int, default=32_000)
    parser.add_argument("--missing", type=float, default=0.05)
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--kv-gib", type=int, default=16, help="of each engine, for K/V")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    given = parser.parse_args()
    texts = Texts(agreement_of(Path(given.model)).following.tolist(), given)
    counts = [int(n) for n in given.requests.split(",")]
    engines = {}
    for name, own in (("list", 0), ("own", given.own)):
        started = time.perf_counter()
        engines[name] = Engine(
            given.model, speculate=given.speculate, max_running_requests=max(counts),
            draft_vocab=texts.listed, draft_vocab_own=own, prefix_caching=False,
            device=given.device, kernels="on", kv_bytes=given.kv_gib << 30,
            dtype="auto" if given.device == "cuda" else "float32",
            max_model_len=given.prompt + given.answer + 64,
        )  # fmt: skip
        print(f"{name}: started in {time.perf_counter() - started:.1f} s", flush=True)
    print(engines["own"].notes, flush=True)
    ways = [("list", "list", None), ("own", "own", None), ("whole", "list", "full")]
    stop, rows = time.monotonic() + given.seconds, []
    for count in counts:
        for _, name, vocab in ways:  # what is compiled, captured or loaded first
            measure(engines[name], texts, KINDS[0], count, 99, min(48, given.answer), vocab)
        for kind in KINDS:
            speeds: dict[str, list[float]] = {way: [] for way, _, _ in ways}
            lengths: dict[str, float] = {}
            for turn in range(given.turns):
                for way, name, vocab in ways if turn % 2 else ways[::-1]:
                    if time.monotonic() > stop and speeds[way]:
                        continue
                    found = measure(engines[name], texts, kind, count, turn, given.answer, vocab)
                    speeds[way].append(found["tokens_per_second"])
                    lengths[way] = found["acceptance_length"]
            row: dict[str, Any] = {"requests": count, "kind": kind}
            for way, each in speeds.items():
                turns = min(len(each), len(speeds["list"]))
                ratio = statistics.median(each[i] / speeds["list"][i] for i in range(turns))
                row[way] = {
                    "tokens_per_second": round(statistics.median(each), 1),
                    "to_list": round(ratio, 4), "acceptance_length": round(lengths[way], 3),
                    "each": [round(speed, 1) for speed in each],
                }  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps({"options": vars(given), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
